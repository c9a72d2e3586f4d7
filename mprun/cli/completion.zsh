#compdef mprun
# mprun: completion for zsh, written by `mprun --completion zsh`. Install it into a folder of fpath:
#   mprun --completion zsh > ~/.zfunc/_mprun

_mprun() {
    local word=$PREFIX key
    local -a values keys found names

    if [[ $word == *=* ]]; then
        key=${word%%=*}
        case ${key#+} in
@VALUES@
        esac
        compset -P '*='
        if (( $#values )); then
            compset -P '*,'
            compadd -a values
        else
            _files
        fi
        return
    fi

    case $words[2] in
@KEYS@
    esac
    (( CURRENT == 2 )) && names=(@COMMANDS@)
    [[ $word == -* ]] && names+=(@OPTIONS@)
    for key in $keys; do
        [[ $word == *.* || $key != *.* ]] || key=${key%%.*}.
        found+=$key
    done
    compadd -S '' -a found
    compadd -a names
    [[ $words[2] == compare || $words[CURRENT-1] == --config-dir ]] && _files
}

if [[ $funcstack[1] == _mprun ]]; then
    _mprun "$@"
else
    compdef _mprun mprun
fi
