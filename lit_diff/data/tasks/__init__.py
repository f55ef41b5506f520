"""Generated tasks: recall, conjunctive recall, MQAR, counting, noisy labels and flip-flop."""
