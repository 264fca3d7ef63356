#!/usr/bin/env bash
# Train the captioning model with torch.distributed.launch, for clusters whose scripts still use it. Newer scripts use
# torchrun (train_dist_torchrun.sh), into which torch has turned it.
#
# Usage: ./train_dist_launch.sh --num_gpus 4 --config config.yaml [steps=100 ...] [-- arguments of train.py]
#
#   --num_gpus N       processes on this machine (default: the GPUs that nvidia-smi shows)
#   --config F.yaml    a file of settings
#   --num_nodes M      machines; run the same command on each of them, with its own --node_rank
#   --node_rank R      number of this machine, from 0
#   --master_addr H    address of machine 0
#   --master_port P    a port that is free there (default 29500; on one machine any free port)
set -euo pipefail
# shellcheck source=options.sh
source "$(dirname "$0")/options.sh"

read_options "num_gpus config num_nodes node_rank master_addr master_port" "$@"
describe_launch
exec python -m torch.distributed.launch "${LAUNCH[@]}" "${TRAIN[@]}"
