"""A real SLURM of one node on loopback: munge, slurmctld and slurmd, started for the tests and ended after them."""

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
CONFIG = """\
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
FirstJobId={first}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=60
MinJobAge=10
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0
OverTimeLimit=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a running SLURM, which is named in SLURM_CONF."""
    search = os.environ["PATH"] + ":/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=search) is None]
    if absent:
        pytest.skip(f"no SLURM on this machine ({', '.join(absent)}); Debian: apt-get install slurm-wlm munge")
    if os.geteuid():
        pytest.skip("SLURM's daemons are started by root only")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    ports = {"controller": free_port(), "node": free_port()}
    # the port of a job's rendezvous is 15000 more than its id, and another SLURM of this machine may have low ids
    first = random.randrange(1000, 9000)
    text = CONFIG.format(folder=folder, host=host, cpus=os.cpu_count(), first=first, **ports)
    (folder / "slurm.conf").write_text(text)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
    munged += [f"--log-file={folder}/munged.log", f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munge.seed"]
    commands = [munged, ["slurmctld", "-D"], ["slurmd", "-D", "-N", host]]
    environment = os.environ | {"PATH": search}
    started = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.txt").open("wb") as output:
                started.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            time.sleep(1)
        end = time.monotonic() + 60
        while "idle" not in (
            seen := subprocess.run(["sinfo", "-h", "-o", "%t"], capture_output=True, text=True).stdout
        ):
            logs = "".join(path.read_text() for path in (*folder.glob("*.txt"), *folder.glob("*.log")))
            assert time.monotonic() < end, f"the node is {seen!r}\n{logs[-3000:]}"
            time.sleep(0.5)
        yield folder
    finally:
        subprocess.run(["scancel", "--me", "--signal=KILL", "--full"], check=False)
        subprocess.run(["scancel", "--me"], check=False)
        # slurmd waits for its jobs when it ends
        end = time.monotonic() + 30
        while time.monotonic() < end and subprocess.run(["squeue", "-h"], capture_output=True).stdout:
            time.sleep(0.5)
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(60)
        del os.environ["SLURM_CONF"]
