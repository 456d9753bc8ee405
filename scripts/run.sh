#!/usr/bin/env bash
# Run a daemon with its dashboard and, unless SIMULATE=0, two simulated engines of one model. `make run` calls this.
# The second engine has another attention backend, so it must not share with the first; the page says why.
# Every setting of the daemon is a variable, e.g. PAGEWARDEN_PORT; see docs/configuration.md. Ctrl-C ends all of it.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=${BIN:-.venv/bin}
simulate=${SIMULATE:-1}
port=${PAGEWARDEN_PORT:-6555}
http_port=${PAGEWARDEN_HTTP_PORT:-6580}
host=${PAGEWARDEN_HOST:-127.0.0.1}
http_host=${PAGEWARDEN_HTTP_HOST:-127.0.0.1}
export PAGEWARDEN_L1_SIZE_GB=${PAGEWARDEN_L1_SIZE_GB:-1}

listens() { (: <"/dev/tcp/$1/$2") 2>/dev/null; }
if listens "$host" "$port"; then
    exec "$bin/pagewarden" server # it says what is wrong, and with which exit status
fi

children=()
stop() {
    trap '' INT TERM
    # The engines first, so that they can say goodbye; then the daemon.
    for child in "${children[@]:1}"; do kill -TERM "$child" 2>/dev/null || true; done
    for child in "${children[@]:1}"; do wait "$child" 2>/dev/null || true; done
    if ((${#children[@]})); then
        kill -TERM "${children[0]}" 2>/dev/null || true
        wait "${children[0]}" 2>/dev/null || true
    fi
}
trap stop EXIT
trap 'exit 0' INT TERM

# At the first start the admin's password is made here, so that it can stand below, next to where to log in.
catalog=${PAGEWARDEN_CATALOG:-${XDG_STATE_HOME:-$HOME/.local/state}/pagewarden/catalog.db}
shown="as admin; the password was shown at the first start (another one: $bin/pagewarden user password admin --port $port)"
if [[ ! -e $catalog && -z ${PAGEWARDEN_ADMIN_PASSWORD:-} && -z ${PAGEWARDEN_ADMIN_PASSWORD_FILE:-} ]]; then
    PAGEWARDEN_ADMIN_PASSWORD=$("$bin/python" -c 'from appliance.credentials import generate_password as g; print(g())')
    export PAGEWARDEN_ADMIN_PASSWORD
    shown="as admin with the password $PAGEWARDEN_ADMIN_PASSWORD (not shown again)"
fi

"$bin/pagewarden" server &
children+=($!)
unset PAGEWARDEN_ADMIN_PASSWORD
until "$bin/pagewarden" status --host "$host" --port "$port" 2>/dev/null | grep -q '"ready": true'; do
    if ! kill -0 "${children[0]}" 2>/dev/null; then
        status=0
        wait "${children[0]}" || status=$?
        children=()
        exit "$status"
    fi
    sleep 0.2
done

for _ in {1..50}; do
    listens "$http_host" "$http_port" && break
    sleep 0.2
done

if [[ $simulate != 0 ]]; then
    engine() {
        "$bin/python" -m connector.simulate --model kimi-linear-48b --tp 2 --scale 256 --rate 0.5 --abort-share 0.05 \
            --cache-tokens 16384 --host "$host" --port "$port" "$@" >/dev/null &
        children+=($!)
    }
    engine --engine-id kimi-a --seed 1
    engine --engine-id kimi-b --seed 2 --attention-backend FLASH_ATTN_MLA
fi

cat <<TEXT

Pagewarden is ready.
  Dashboard      http://$http_host:$http_port/
  Log in         $shown
  Control port   $port

Point a vLLM at it:
  vllm serve MODEL --enable-prefix-caching --mamba-cache-mode align --kv-transfer-config '{
    "kv_connector": "PagewardenConnector", "kv_connector_module_path": "connector.vllm", "kv_role": "kv_both",
    "kv_connector_extra_config": {"pagewarden.port": $port}}'
  (leave --mamba-cache-mode out for a model with attention only)

Ctrl-C ends it.
TEXT
wait -n "${children[@]}" || true
echo "A process ended; stopping the others." >&2
exit 1
