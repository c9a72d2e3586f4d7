# mprun: completion for fish, written by `mprun --completion fish`. Install it with
#   mprun --completion fish > ~/.config/fish/completions/mprun.fish

function __mprun_candidates
    set -l word (commandline -ct)
    set -l typed (commandline -opc)
    set -l values
    set -l keys
    if string match -q -- '*=*' "$word"
        switch (string replace -r -- '^\+?([^=]*)=.*' '$1' "$word")
@VALUES@
        end
        set -l before (string replace -r -- '[^=,]*$' '' "$word")
        for value in $values
            echo $before$value
        end
        return
    end

    switch "$typed[2]"
@KEYS@
    end
    for key in $keys
        if string match -q -- '*.*' "$word"; or not string match -q -- '*.*' $key
            echo $key
        else
            string replace -r -- '\..*' '.' $key
        end
    end | sort -u
    if test (count $typed) -eq 1
        printf '%s\n' @COMMANDS@
    end
    if string match -q -- '-*' "$word"
        printf '%s\n' @OPTIONS@
    end
end

complete -c mprun -a '(__mprun_candidates)'
