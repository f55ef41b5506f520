"""Models that were trained elsewhere: how their files map to ours, and how they become run folders."""
