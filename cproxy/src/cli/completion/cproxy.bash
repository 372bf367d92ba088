# Completion of cproxy for bash: cproxy itself names the candidates.
_cproxy() {
    local line word=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    [[ $word == = ]] && word=
    while IFS= read -r line; do
        [[ $line == "$word"* ]] && COMPREPLY+=("${line%%$'\t'*}")
    done < <("${COMP_WORDS[0]}" complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o bashdefault -o default -F _cproxy cproxy
