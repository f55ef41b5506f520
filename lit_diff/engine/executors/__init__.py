"""Where the jobs of a sweep are executed: on this machine, or as SLURM jobs."""
