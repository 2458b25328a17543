# Makes the environment $venv for scripts/setup, which sources this file, if it is missing or if a start that failed has
# left it without pip. PYTHON names the Python to use. Otherwise it is the first of python3, python3.14 to python3.11
# that is new enough.

python_env_is_whole() { "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

make_python_env() {
    local name new="" old="" version
    for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        # A name may exist and not run: pyenv has one for each version, and refuses those that are not chosen.
        version=$("$name" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || continue
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then new=$name; break; fi
        old+=" $name is Python $version."
    done
    if [ -z "$new" ]; then
        echo "scripts/setup: specoffload needs Python 3.11 or newer.${old:- ${PYTHON:-python3} is not installed.} Install one" \
            "(Ubuntu 22.04: apt-get install python3.11 python3.11-venv), then: PYTHON=python3.11 scripts/setup" >&2
        exit 2
    fi
    [ ! -e "$venv" ] || [ -e "$venv/pyvenv.cfg" ] || rmdir "$venv" 2>/dev/null ||
        { echo "scripts/setup: $venv is no environment of Python: VENV names another folder" >&2; exit 2; }
    [ ! -e "$venv" ] || echo "scripts/setup: $venv is of a start that failed, or of an old Python, and is made anew" >&2
    rm -rf "$venv"
    "$new" -m venv "$venv" >"$venv.log" 2>&1 && python_env_is_whole && rm -f "$venv.log" && return
    version=${version%.*}
    cat "$venv.log" >&2; rm -rf "$venv" "$venv.log"
    echo "scripts/setup: $new cannot make $venv: install its venv (Debian and Ubuntu: apt-get install python$version-venv)," \
        "or name another Python 3.11 or newer: PYTHON=python3.12 scripts/setup" >&2
    exit 2
}
