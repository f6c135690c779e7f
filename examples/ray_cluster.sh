#!/usr/bin/env bash
# A Ray cluster of two nodes with its dashboard, and a server whose ranks Ray places on both. All on this host:
#
#     pip install "quire-llm[ray]" "ray[default]"     # the second one is the dashboard
#     examples/ray_cluster.sh -tp 2 -pp 2         # MODEL and flags of `quire serve`
#
# On two hosts, run the first `ray start` on one, the second with its address on the other, and `quire serve` on the
# first; without --num-cpus, Ray counts GPUs and cores. Both need the same RAY_AUTH_TOKEN.
# The dashboard, at http://127.0.0.1:8265, shows the nodes, the placement group with a bundle for each rank, and the
# actors that start the ranks. It asks for the token.
set -euo pipefail
port=${RAY_PORT:-6379}
dashboard=${RAY_DASHBOARD_PORT:-8265}
made=''
[ -n "${RAY_AUTH_TOKEN:-}" ] || made=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$made}
export RAY_ADDRESS=127.0.0.1:$port
RAY_TMPDIR=$(mktemp -d /tmp/ray-XXXXXX) # logs; and programs that look for a cluster on this host do not find this one
export RAY_TMPDIR
trap 'kill $(jobs -p) 2> /dev/null; wait; rm -rf "$RAY_TMPDIR"' EXIT

wait_for_nodes() {
    until [ "$(ray status 2> /dev/null | grep -c ' node_')" = "$1" ]; do
        kill -0 $! # an error ends this script, too
        sleep 1
    done
}
common=(--block --num-cpus 2 --object-store-memory 100000000 --disable-usage-stats)
ray start --head --port "$port" --dashboard-port "$dashboard" "${common[@]}" &
wait_for_nodes 1
ray start --address "$RAY_ADDRESS" "${common[@]}" &
wait_for_nodes 2

echo "dashboard: http://127.0.0.1:$dashboard, token: ${made:-that of RAY_AUTH_TOKEN}"
quire serve "$@" --distributed-executor-backend ray &
wait $!
