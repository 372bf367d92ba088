#!/bin/sh
### BEGIN INIT INFO
# Provides:          cproxy
# Required-Start:    $local_fs
# Required-Stop:
# X-Start-Before:    containerd crio docker kubelet
# Default-Start:     2 3 4 5
# Default-Stop:      0 1 6
# Short-Description: Kubernetes Services by socket hooks
### END INIT INFO
#
# `start` returns when Services work or the timeout has expired (settings `timeout`, `on-timeout`). The script restarts
# the agent whenever it ends. `stop` leaves hooks and table in the kernel; `cproxy cleanup` removes them.

DAEMON=/usr/bin/cproxy
PIDFILE=/run/cproxy.pid
LOG=/var/log/cproxy.log

# Pid of the loop that restarts the agent.
pid() {
    pid=$(cat "$PIDFILE" 2>/dev/null) && kill -0 "$pid" 2>/dev/null
}

keep_running() {
    agent=
    trap 'kill "$agent" && wait "$agent"; exit 0' TERM
    trap 'kill -HUP "$agent"' HUP
    while :; do
        "$DAEMON" run &
        agent=$!
        # A signal ends the wait, not the agent.
        while wait "$agent"; ended=$?; kill -0 "$agent" 2>/dev/null; do :; done
        # With the setting enabled = false, it has said so.
        [ "$ended" -ne 3 ] || exit 0
        sleep 1 &
        wait $!
    done
}

start() {
    if ! pid; then
        keep_running </dev/null >>"$LOG" 2>&1 &
        echo $! >"$PIDFILE"
    fi
    "$DAEMON" wait
}

stop() {
    pid || return 0
    kill "$pid"
    while kill -0 "$pid" 2>/dev/null; do sleep 1; done
    rm -f "$PIDFILE"
}

case "$1" in
    start) start ;;
    stop) stop ;;
    restart | force-reload) stop && start ;;
    # Reads settings and credentials again.
    reload) pid && kill -HUP "$pid" ;;
    status)
        # LSB: 3 means not running.
        pid || { echo "cproxy is not running"; exit 3; }
        "$DAEMON" wait --timeout 0 --on-timeout fail && echo "cproxy is running and ready"
        ;;
    *)
        echo "usage: $0 start|stop|restart|reload|status" >&2
        exit 2
        ;;
esac
