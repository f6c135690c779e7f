#!/usr/bin/env bash
# A node of a Ray cluster, in a container that lives as long as this script. Run it on each node:
#   scripts/run_cluster.sh IMAGE HEAD_IP --head   HF_HOME [docker args…]
#   scripts/run_cluster.sh IMAGE HEAD_IP --worker HF_HOME [docker args…]
# then, on the head: docker exec -it CONTAINER quire serve MODEL -tp 8 -pp 2
#
# From the environment:
#   QUIRE_HOST_IP    this node's address, as the others reach it (default: that of the interface towards HEAD_IP)
#   RAY_AUTH_TOKEN   the same on every node: who has it may use the cluster; RAY_AUTH_TOKEN_PATH is a file that holds it.
#                    Without either, token authentication is off on this node, and must be on all.
#   RAY_PORT         of the head (6379)
set -euo pipefail

fail() {
  echo "run_cluster.sh: $1" >&2
  exit 2
}

[[ $# -ge 4 ]] || fail "usage: run_cluster.sh IMAGE HEAD_IP --head|--worker HF_HOME [docker args…]"
image=$1 head_ip=$2 role=$3 hf_home=$4
shift 4
port=${RAY_PORT:-6379}
[[ $role == --head || $role == --worker ]] || fail "--head or --worker is expected, not $role"
[[ -d $hf_home ]] || fail "$hf_home (HF_HOME): there is no such folder"
hf_home=$(cd "$hf_home" && pwd)
command -v docker > /dev/null || fail "docker is not installed"

has_gpus=false
nvidia-smi -L > /dev/null 2>&1 && has_gpus=true
for argument in "$@"; do
  case $argument in
    QUIRE_HOST_IP=* | --env=QUIRE_HOST_IP=* | -eQUIRE_HOST_IP=*) QUIRE_HOST_IP=${argument##*QUIRE_HOST_IP=} ;;
    --gpus | --gpus=*) has_gpus=false ;; # as the caller says
  esac
done

# Ray and Quire use one address of this node.
if [[ $role == --head ]]; then
  [[ ${QUIRE_HOST_IP:-$head_ip} == "$head_ip" ]] ||
    fail "QUIRE_HOST_IP is $QUIRE_HOST_IP on the head, whose address is to be HEAD_IP, $head_ip"
  export QUIRE_HOST_IP=$head_ip
elif [[ -z ${QUIRE_HOST_IP:-} ]]; then
  QUIRE_HOST_IP=$(ip -o route get "$head_ip" 2> /dev/null | sed -n 's/.* src \([^ ]*\).*/\1/p') || true
  [[ -n $QUIRE_HOST_IP ]] || fail "no interface reaches $head_ip; give this node's address in QUIRE_HOST_IP"
fi
export QUIRE_HOST_IP

# One token for all nodes, or none on any: a node with another one would try for long, and fail.
if [[ -z ${RAY_AUTH_TOKEN:-} && -n ${RAY_AUTH_TOKEN_PATH:-} ]]; then
  RAY_AUTH_TOKEN=$(cat "$RAY_AUTH_TOKEN_PATH") || fail "RAY_AUTH_TOKEN_PATH cannot be read"
fi
if [[ -n ${RAY_AUTH_TOKEN:-} && ${RAY_AUTH_MODE:-token} == token ]]; then
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
  authentication=(-e RAY_AUTH_MODE -e RAY_AUTH_TOKEN) # without the value, which ps would show
elif [[ ${RAY_AUTH_MODE:-} == token ]]; then
  fail "RAY_AUTH_MODE=token needs RAY_AUTH_TOKEN, the same on every node (openssl rand -hex 32 makes one)"
else
  export RAY_AUTH_MODE=disabled
  authentication=(-e RAY_AUTH_MODE)
  echo "run_cluster.sh: without RAY_AUTH_TOKEN, whoever reaches port $port can run code on every node" >&2
fi

start=(ray start --block "--node-ip-address=$QUIRE_HOST_IP" --disable-usage-stats)
if [[ $role == --head ]]; then
  start+=(--head "--port=$port")
else
  start+=("--address=$head_ip:$port")
fi
gpus=()
if $has_gpus; then gpus=(--gpus all); fi
name=quire-node-$$-$RANDOM

stop() {
  trap - EXIT
  docker stop --time 10 "$name" > /dev/null 2>&1 || true
  docker rm --force "$name" > /dev/null 2>&1 || true
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

echo "run_cluster.sh: container $name is the ${role#--} at $QUIRE_HOST_IP" >&2
# In the background, so that a signal is heard while it runs.
docker run --name "$name" --init --network host --ipc host "${gpus[@]}" \
  -v "$hf_home:/root/.cache/huggingface" -e HF_HOME=/root/.cache/huggingface \
  -e QUIRE_HOST_IP "${authentication[@]}" "$@" --entrypoint "${start[0]}" "$image" "${start[@]:1}" &
wait $!
