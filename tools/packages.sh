# Installs Debian packages. Scripts source this file in the root of the repository and define `say`.

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        # sudo may ask for a password only on a terminal.
        if [ -t 0 ]; then sudo "$@"; else sudo -n "$@"; fi
    else
        say "needs root or sudo for: $*"
        return 1
    fi
}

# Runs an apt command as root. Its output appears only if it fails. The package lists can be missing, or name
# files that the mirror has replaced, so a first failure fetches them and tries again.
run_apt() {
    local log status=0
    log=$(mktemp)
    if ! as_root env DEBIAN_FRONTEND=noninteractive "$@" >"$log" 2>&1; then
        as_root apt-get -q -o DPkg::Lock::Timeout=300 update >>"$log" 2>&1 || true
        as_root env DEBIAN_FRONTEND=noninteractive "$@" >>"$log" 2>&1 || status=1
    fi
    if [ $status -ne 0 ]; then
        cat "$log" >&2
        say "failed: $*"
    fi
    rm -f "$log"
    return $status
}

# Installs packages without asking.
install_packages() {
    say "installing $*"
    run_apt apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
}

# Installs the packages that are missing. Each argument is PROBE:PACKAGES. A probe that begins with a slash is
# a file, any other probe is a command. The packages count as missing if their probe does not exist.
install_missing() {
    local need probe missing=()
    for need in "$@"; do
        probe=${need%%:*}
        case $probe in
            /*) [ -e "$probe" ] || missing+=(${need#*:}) ;;
            *) command -v "$probe" >/dev/null || missing+=(${need#*:}) ;;
        esac
    done
    [ ${#missing[@]} -eq 0 ] || install_packages "${missing[@]}"
}
