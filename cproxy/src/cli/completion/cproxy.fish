# Completion of cproxy for fish: cproxy itself names the candidates.
function __cproxy_candidates
    set -l words (commandline -opc)
    $words[1] complete -- $words[2..] (commandline -ct) 2>/dev/null
end
complete -c cproxy -f -n 'test -n "$(__cproxy_candidates)"' -a '(__cproxy_candidates)'
