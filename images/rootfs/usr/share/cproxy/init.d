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

# Pid of the loop that restarts the agent. A pid file from before may have that of another process by now.
pid() {
    pid=$(cat "$PIDFILE" 2>/dev/null) && kill -0 "$pid" 2>/dev/null && grep -q cproxy "/proc/$pid/cmdline" 2>/dev/null
}

keep_running() {
    # Nothing of the caller's stays open: it may wait for the end of a pipe.
    exec </dev/null >>"$LOG" 2>&1
    agent=
    trap 'kill "$agent" && wait "$agent"; exit 0' TERM
    # HUP cannot be trapped where it was ignored before, as under nohup.
    trap 'kill -HUP "$agent"' HUP USR1
    # A package that is removed takes the program away.
    while [ -x "$DAEMON" ]; do
        "$DAEMON" run &
        agent=$!
        # A signal ends the wait, not the agent.
        while wait "$agent"; ended=$?; kill -0 "$agent" 2>/dev/null; do :; done
        # With the setting enabled = false, it has said so.
        [ "$ended" -ne 3 ] || break
        sleep 1 &
        wait $!
    done
    rm -f "$PIDFILE"
    exit 0
}

start() {
    # The script stays when its package is removed.
    [ -x "$DAEMON" ] || { echo "$DAEMON is not installed"; return; }
    if ! pid; then
        keep_running &
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
    reload) pid && kill -USR1 "$pid" ;;
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
