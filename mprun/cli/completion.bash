# mprun: completion for bash, written by `mprun --completion bash`. Install it with
#   mprun --completion bash > ~/.local/share/bash-completion/completions/mprun

_mprun() {
    local line=${COMP_LINE:0:COMP_POINT} word='' command key before
    local -a typed values=() keys=() names=()
    read -ra typed <<< "$line"
    [[ $line == *[[:space:]] ]] || word=${typed[${#typed[@]} - 1]}
    command=${typed[1]}
    COMPREPLY=()

    if [[ $word == *=* ]]; then
        key=${word%%=*}
        case ${key#+} in
@VALUES@
        esac
        before=${word%"${word##*[=,]}"}  # up to the last value of a list
        for key in "${values[@]}"; do
            [[ $before$key == "$word"* ]] && COMPREPLY+=("$before$key")
        done
        if [[ $COMP_WORDBREAKS == *=* ]]; then  # readline completes what stands behind the '='
            COMPREPLY=("${COMPREPLY[@]#*=}")
        fi
        return
    fi

    case $command in
@KEYS@
    esac
    if [[ ${#typed[@]} -lt 2 || ( ${#typed[@]} -eq 2 && -n $word ) ]]; then
        names=(@COMMANDS@)
    fi
    [[ $word == -* ]] && names+=(@OPTIONS@)
    for key in "${keys[@]}"; do
        [[ $word == *.* || $key != *.* ]] || key=${key%%.*}.
        [[ $key == "$word"* ]] && COMPREPLY+=("$key")
    done
    [[ ${#COMPREPLY[@]} -gt 0 ]] && compopt -o nospace 2> /dev/null
    for key in "${names[@]}"; do
        [[ $key == "$word"* ]] && COMPREPLY+=("$key")
    done
}

complete -o default -F _mprun mprun
