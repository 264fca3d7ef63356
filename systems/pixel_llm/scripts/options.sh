# shellcheck shell=bash
# Reads the options of the scripts in this folder, which source this file and have a usage text in their first comment.
#
# An option may be written --num_gpus 4, --num_gpus=4 or --num-gpus 4. The variables NUM_GPUS, NUM_NODES, NODE_RANK,
# MASTER_ADDR and MASTER_PORT stand in for options that are missing, as schedulers set them. Words such as steps=100, and
# everything after --, are left in REST.

fail() {
  echo "${0##*/}: $1" >&2
  echo "  do:    ${0##*/} --help" >&2
  exit 2
}

usage() {
  # The first comment of the script, from its second line to the first line that is none.
  sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p;}' "$0"
  exit 0
}

# whole_number OPTION VALUE LEAST: checks the value, and sets the option's variable to it, without leading zeros.
whole_number() {
  if ! [[ $2 =~ ^[0-9]{1,9}$ ]] || ((10#$2 < $3)); then
    fail "--$1 $2 is not a whole number of at least $3"
  fi
  printf -v "${1^^}" '%d' "$((10#$2))"
}

# read_options ALLOWED "$@": sets the variable of each option that was given.
read_options() {
  local allowed=" $1 " word name value
  shift
  REST=()
  CONFIG=
  while (($#)); do
    word=$1
    shift
    case $word in
      --) REST+=("$@"); break ;;
      -h | --help) usage ;;
      --*)
        name=${word%%=*}
        name=${name#--}
        name=${name//-/_}
        [[ $allowed == *" $name "* ]] || fail "there is no option $word (arguments of the training follow --)"
        if [[ $word == *=* ]]; then
          value=${word#*=}
        else
          (($#)) || fail "--$name needs a value"
          value=$1
          shift
        fi
        [[ -n $value && $value != --* ]] || fail "--$name needs a value"
        printf -v "${name^^}" '%s' "$value"
        ;;
      -*) fail "there is no option $word" ;;
      *=*) REST+=("$word") ;;
      *) fail "$word is neither an option nor a setting such as steps=100" ;;
    esac
  done

  # One process for each GPU, unless a number was given.
  if [[ -z ${NUM_GPUS:-} ]]; then
    NUM_GPUS=$( (nvidia-smi --list-gpus 2> /dev/null || true) | wc -l)
    ((NUM_GPUS)) || fail "nvidia-smi shows no GPU: --num_gpus says how many processes to start"
  fi
  NUM_NODES=${NUM_NODES:-1}
  whole_number num_gpus "$NUM_GPUS" 1
  whole_number num_nodes "$NUM_NODES" 1
  [[ -z ${MASTER_PORT:-} ]] || whole_number master_port "$MASTER_PORT" 1
  [[ -z $CONFIG || -r $CONFIG ]] || fail "--config $CONFIG cannot be read"

  if ((NUM_NODES > 1)); then
    case ${MASTER_ADDR:-} in
      "") fail "--num_nodes $NUM_NODES needs --master_addr, the address of the first machine" ;;
      localhost | 127.0.0.1 | ::1) fail "--master_addr $MASTER_ADDR is another machine on each of them" ;;
    esac
  fi
}

# Sets LAUNCH, the options that torchrun and torch.distributed.launch have in common, and TRAIN, what they start.
describe_launch() {
  NODE_RANK=${NODE_RANK:-0}
  whole_number node_rank "$NODE_RANK" 0
  ((NODE_RANK < NUM_NODES)) || fail "--node_rank $NODE_RANK is not one of $NUM_NODES machines, which are counted from 0"

  LAUNCH=("--nproc_per_node=$NUM_GPUS")
  if ((NUM_NODES == 1)) && [[ -z ${MASTER_PORT:-} ]]; then
    # One machine needs no port that others know, and a free one cannot collide with another job.
    LAUNCH+=(--standalone)
  else
    LAUNCH+=("--nnodes=$NUM_NODES" "--node_rank=$NODE_RANK")
    LAUNCH+=("--master_addr=${MASTER_ADDR:-localhost}" "--master_port=${MASTER_PORT:-29500}")
  fi

  TRAIN=("$(dirname "${BASH_SOURCE[0]}")/../train.py")
  if [[ -n $CONFIG ]]; then TRAIN+=(--config "$CONFIG"); fi
  TRAIN+=(--distributed "${REST[@]}")

  # Otherwise each rank would start a thread for every core of the machine, or torchrun would allow only one.
  if [[ -z ${OMP_NUM_THREADS:-} ]]; then
    OMP_NUM_THREADS=$(($(nproc) / NUM_GPUS))
    export OMP_NUM_THREADS=$((OMP_NUM_THREADS > 0 ? OMP_NUM_THREADS : 1))
  fi
}
