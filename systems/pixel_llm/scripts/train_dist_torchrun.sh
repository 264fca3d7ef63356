#!/usr/bin/env bash
# Train the captioning model with torchrun: one process for each GPU.
#
# Usage: ./train_dist_torchrun.sh --num_gpus 4 --config config.yaml [steps=100 ...] [-- arguments of train.py]
#
#   --num_gpus N       processes on this machine (default: the GPUs that nvidia-smi shows)
#   --config F.yaml    a file of settings
#   --num_nodes M      machines; run the same command on each of them, with its own --node_rank
#   --node_rank R      number of this machine, from 0
#   --master_addr H    address of machine 0
#   --master_port P    a port that is free there (default 29500; on one machine any free port)
#
# On two machines: ./train_dist_torchrun.sh --num_gpus 4 --num_nodes 2 --node_rank 0 --master_addr 10.0.0.1
set -euo pipefail
# shellcheck source=options.sh
source "$(dirname "$0")/options.sh"

read_options "num_gpus config num_nodes node_rank master_addr master_port" "$@"
describe_launch
exec torchrun "${LAUNCH[@]}" "${TRAIN[@]}"
