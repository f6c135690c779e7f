#!/usr/bin/env bash
# Start a node of a Ray cluster in a container that runs as long as this script. Run it on each node:
#   scripts/run_cluster.sh IMAGE HEAD_IP --head   HF_HOME [docker args…]
#   scripts/run_cluster.sh IMAGE HEAD_IP --worker HF_HOME [docker args…]
# then, on the head: docker exec -it CONTAINER quire serve MODEL -tp 8 -pp 2
#
# IMAGE is quire:cuda, or another one that was built with EXTRAS=ray. Its processes run as the user who runs this script,
# so that they can read and write HF_HOME, a folder of this host.
#
# From the environment:
#   QUIRE_HOST_IP    this node's address, reachable from the others (default: the address of the interface to HEAD_IP)
#   RAY_AUTH_TOKEN   grants access to the cluster, the same on every node; RAY_AUTH_TOKEN_PATH is a file with the token.
#                    Without either, token authentication is off on this node, and must be off on all nodes.
#   RAY_PORT         port of the head (default: 6379)
set -euo pipefail

fail() {
  echo "run_cluster.sh: $1" >&2
  exit 2
}

[[ $# -ge 4 ]] || fail "usage: run_cluster.sh IMAGE HEAD_IP --head|--worker HF_HOME [docker args…]"
image=$1 head_ip=$2 role=$3 hf_home=$4
shift 4
port=${RAY_PORT:-6379}
[[ $role == --head || $role == --worker ]] || fail "expected --head or --worker, got $role"
[[ -d $hf_home ]] || fail "$hf_home (HF_HOME): no such folder"
hf_home=$(cd "$hf_home" && pwd)
command -v docker > /dev/null || fail "docker is not installed"

has_gpus=false
nvidia-smi -L > /dev/null 2>&1 && has_gpus=true
for argument in "$@"; do
  case $argument in
    QUIRE_HOST_IP=* | --env=QUIRE_HOST_IP=* | -eQUIRE_HOST_IP=*) QUIRE_HOST_IP=${argument##*QUIRE_HOST_IP=} ;;
    --gpus | --gpus=*) has_gpus=false ;; # given by the caller
  esac
done

# Ray and Quire use one address of this node.
if [[ $role == --head ]]; then
  [[ ${QUIRE_HOST_IP:-$head_ip} == "$head_ip" ]] ||
    fail "QUIRE_HOST_IP is $QUIRE_HOST_IP on the head; it must be HEAD_IP, $head_ip"
  export QUIRE_HOST_IP=$head_ip
elif [[ -z ${QUIRE_HOST_IP:-} ]]; then
  QUIRE_HOST_IP=$(ip -o route get "$head_ip" 2> /dev/null | sed -n 's/.* src \([^ ]*\).*/\1/p') || true
  [[ -n $QUIRE_HOST_IP ]] || fail "no interface reaches $head_ip; set QUIRE_HOST_IP to this node's address"
fi
export QUIRE_HOST_IP

# All nodes must have the same token, or none: a node with another token retries for a long time and fails.
if [[ -z ${RAY_AUTH_TOKEN:-} && -n ${RAY_AUTH_TOKEN_PATH:-} ]]; then
  RAY_AUTH_TOKEN=$(cat "$RAY_AUTH_TOKEN_PATH") || fail "cannot read RAY_AUTH_TOKEN_PATH"
fi
if [[ -n ${RAY_AUTH_TOKEN:-} && ${RAY_AUTH_MODE:-token} == token ]]; then
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
  authentication=(-e RAY_AUTH_MODE -e RAY_AUTH_TOKEN) # without the value, which ps would show
elif [[ ${RAY_AUTH_MODE:-} == token ]]; then
  fail "RAY_AUTH_MODE=token needs RAY_AUTH_TOKEN, the same on every node (create one with: openssl rand -hex 32)"
else
  export RAY_AUTH_MODE=disabled
  authentication=(-e RAY_AUTH_MODE)
  echo "run_cluster.sh: without RAY_AUTH_TOKEN, anyone who can reach port $port can run code on every node" >&2
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
# In the background, so that signals are handled while it runs.
docker run --name "$name" --init --network host --ipc host "${gpus[@]}" --no-healthcheck \
  --user "$UID:${GROUPS[0]}" -v "$hf_home:/cache/huggingface" \
  -e QUIRE_HOST_IP "${authentication[@]}" "$@" --entrypoint "${start[0]}" "$image" "${start[@]:1}" &
wait $!
