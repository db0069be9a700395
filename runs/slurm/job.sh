# What the Slurm files share: every machine of the job runs the command of a make target on the job's GPUs. After a
# signal (the time limit, preemption) it saves, and the job goes back into the queue, until the command is finished.
#   run_target TARGET [FLAGS]
# Set by the user: BASE (outputs, in a folder that all machines share), ENV_PYTHON (the interpreter), and make's other
# settings.
# shellcheck shell=bash

set -euo pipefail

export BASE=${BASE:-out}
export ENV_PYTHON=${ENV_PYTHON:-.venv/bin/python}
STOPPED=143 # the exit code after a signal, as of any command that SIGTERM ends
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

run_target() {
  local code=0 command hosts settings=(NGPU="${SLURM_GPUS_ON_NODE:-1}" RESTARTS=3)
  if [ "${SLURM_NNODES:?is set by Slurm: start this file with sbatch}" -gt 1 ]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    settings+=(NNODES="$SLURM_NNODES" RDZV="${hosts%%$'\n'*}:$((20000 + SLURM_JOB_ID % 10000))")
  fi
  command=$(make -n "$1" "${settings[@]}" ARGS="$(printf '%q ' "${@:2}")" | tail -n 1)
  trap : TERM # Slurm signals the tasks. srun must not get the signal: it kills its tasks then
  # srun takes the cores of a task from its own flag alone.
  srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} sh -c "exec $command" || code=$?
  if [ $code -ne $STOPPED ]; then
    exit $code
  fi
  # scancel has ended the job by now: it is not to come back.
  if [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
}
