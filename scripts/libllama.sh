# Functions of setup and wheel, which source this file. `venv` has the Python to use, `log` is a file in it for pip's output.

pip() { # one line of progress; pip's output is in the log, and its errors are shown if it fails
    "$venv/bin/python" -m pip --verbose --disable-pip-version-check "$@" 2>&1 |
        "$venv/bin/python" scripts/build_progress.py "$log" ||
        { grep -iE "error|not found|cannot be installed" "$log" | tail -n 12; echo "failed: all of it is in $log"; exit 1; } >&2
}

libllama_pin() { sed -n 's/^ *"\(llama-cpp-python==[^"]*\)",$/\1/p' pyproject.toml; }

# Prints the wheel of the pinned llama-cpp-python compiled with the settings $1, and compiles it if it is not kept yet.
libllama_wheel() {
    local pin key wheels libraries
    pin=$(libllama_pin)
    # pip's cache ignores the flags of a compilation, so wheels of other flags have a folder of their own.
    key=$({ echo "$pin $1"; cc --version; grep -m1 ^flags /proc/cpuinfo; } 2>/dev/null | sha256sum | cut -c1-16)
    wheels=${XDG_CACHE_HOME:-$HOME/.cache}/specoffload/wheels/$key
    if ! ls "$wheels"/llama_cpp_python-*.whl >/dev/null 2>&1; then
        # Leave out what only llama.cpp's own programs use: half of the files.
        libraries=$(realpath "$venv")/libraries.cmake
        echo "set(LLAMA_BUILD_COMMON OFF)" >"$libraries"
        pip wheel --no-cache-dir --no-deps -w "$wheels" "$pin" -C cmake.define.LLAVA_BUILD=OFF \
            -C cmake.define.CMAKE_PROJECT_llama_cpp_INCLUDE="$libraries" >&2
    fi
    ls "$wheels"/llama_cpp_python-*.whl
}

# Unpacks the source archive of the pinned llama-cpp-python into the folder $1, unless it is there. SDIST names the archive.
libllama_source() {
    local pin unpacking; pin=$(libllama_pin)
    [ "$(cat "$1/pin" 2>/dev/null || true)" != "$pin" ] || return 0
    unpacking=$(mktemp -d)
    if [ -n "${SDIST:-}" ]; then cp "$SDIST" "$unpacking"; else
        pip download --no-deps --no-binary llama-cpp-python "$pin" -d "$unpacking"; fi
    rm -rf "$1"; mkdir -p "$1"
    tar xzf "$unpacking"/llama_cpp_python-*.tar.gz -C "$1" --strip-components=1
    rm -rf "$unpacking"; echo "$pin" >"$1/pin"
}
