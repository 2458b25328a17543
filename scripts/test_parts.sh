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

# Prints the build in ../shared/$1, if there is one. A worktree has it beside the checkout that it belongs to.
shared_build() {
    local main; main=$(dirname "$(git rev-parse --path-format=absolute --git-common-dir 2>/dev/null || echo "$PWD/.git")")
    ls "../shared/$1"/llama_cpp_python-*.whl "$main/../shared/$1"/llama_cpp_python-*.whl 2>/dev/null | head -1 || true
}

# Makes the venv $1, which holds the build $2 and takes all else from the venv $3.
make_venv() {
    local stamp; stamp=$1/.installed-$(sha256sum "$2" | cut -c1-16)-$(realpath "$3" | sha256sum | cut -c1-8)
    [ ! -e "$stamp" ] || return 0
    rm -rf "$1"
    "$3/bin/python" -m venv --without-pip "$1"
    site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    "$3/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$(site "$1")" "$2"
    echo "import site; site.addsitedir('$(site "$3")')" >"$(site "$1")/first.pth"
    touch "$stamp"
}
