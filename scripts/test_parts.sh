# Functions of test-gpu, test-cuda, test-sanitized, test-extras and test-numa, which source this file.

may_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# Installs Debian packages. If it fails, it prints the end of the log.
apt_install() {
    local log; log=$(mktemp)
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@"; } \
        >"$log" 2>&1 || { tail -3 "$log" >&2; return 1; }
}

# Ends a script that cannot test anything: with 1 if CI is set, else with 77, which means skipped (as in automake).
test_nothing() {
    echo "$0: $1; nothing was tested" >&2
    [ -z "${CI:-}" ] || exit 1
    exit 77
}

# Runs pytest as the command $2... and adds to `passed` and `failed`. Adds the run's name $1 to `untested` if tests were
# skipped and none passed, or if no test was chosen although `chosen` (the caller's arguments for pytest) is empty.
passed=0 failed=0 untested='' chosen=''
run_counted() {
    local name=$1 out last status=0 n_passed n_bad; shift
    out=$(mktemp)
    "$@" 2>&1 | tee "$out" || status=${PIPESTATUS[0]}
    last=$(grep -E '^([0-9]+ [a-z]+(, [0-9]+ [a-z]+)*|no tests ran) in ' "$out" | tail -1) || true
    rm "$out"
    count() { local n; n=$(grep -oE "[0-9]+ $1" <<<"$last" | cut -d' ' -f1) || true; echo "${n:-0}"; }
    n_passed=$(count passed) n_bad=$(($(count failed) + $(count error)))
    # The run did not come to its end, or a hook failed. Pytest ends with 5 if no test was chosen.
    if [ "$n_bad" -eq 0 ] && { [ -z "$last" ] || { [ "$status" -ne 0 ] && [ "$status" -ne 5 ]; }; }; then n_bad=1; fi
    passed=$((passed + n_passed)) failed=$((failed + n_bad))
    if [ $((n_passed + n_bad)) -eq 0 ] && { [ -z "$chosen" ] || [ "$(count skipped)" -gt 0 ]; }; then
        untested+="${untested:+; }$name"; fi
}

# Ends a script by what run_counted counted: with 1 if a test failed, and as test_nothing does if a run tested nothing.
end_counted() {
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ] || exit 1
    [ -z "$untested" ] || test_nothing "no test passed in: $untested"
    [ "$passed" -gt 0 ] || test_nothing "no test was chosen"
}

# Prints the build in ../shared/$1, if there is one. A worktree has it beside the checkout that it belongs to.
shared_build() {
    local main; main=$(dirname "$(git rev-parse --path-format=absolute --git-common-dir 2>/dev/null || echo "$PWD/.git")")
    ls "../shared/$1"/llama_cpp_python-*.whl "$main/../shared/$1"/llama_cpp_python-*.whl 2>/dev/null | head -1 || true
}

# Makes .venv-cuda, which holds the CUDA build $1 and takes all else from the venv $2. That build's code for the CPU needs
# AVX-512. Other processors get the same release's code for the CPU from $2, which scripts/setup compiled for them.
make_cuda_venv() {
    make_venv .venv-cuda "$1" "$2"
    grep -qw avx512_bf16 /proc/cpuinfo || cp "$(site "$2")/llama_cpp/lib/libggml-cpu.so.0" "$(site .venv-cuda)/llama_cpp/lib/"
}

# Prints the folder of the venv $1 that holds its packages.
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# Makes the venv $1, which holds the build $2 and takes all else from the venv $3.
make_venv() {
    local stamp; stamp=$1/.installed-$(sha256sum "$2" | cut -c1-16)-$(realpath "$3" | sha256sum | cut -c1-8)
    [ ! -e "$stamp" ] || return 0
    rm -rf "$1"
    "$3/bin/python" -m venv --without-pip "$1"
    "$3/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$(site "$1")" "$2"
    echo "import site; site.addsitedir('$(site "$3")')" >"$(site "$1")/first.pth"
    touch "$stamp"
}
