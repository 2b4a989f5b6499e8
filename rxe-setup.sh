#!/usr/bin/env bash
# Gives a command an RDMA device: the machine's own, a software one (rdma_rxe)
# in the running kernel, or a software one in a small guest. See --help.
# shellcheck disable=SC2317 # functions are also called through variables
set -u -o pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
SELF=$(basename -- "${BASH_SOURCE[0]}")
CACHE=$ROOT/target/rxe-setup
VIRTME_NG=1.42           # the version this script was tested with
LIBCLANG_WHEEL=14.0.6    # the last one before 16 that ships libclang.so
MARK="made by rxe-setup" # interface alias: says which dummies are ours
KVM_PROBE_SECONDS=20
MTU=4200                 # of the dummies: room for RoCE's largest packet, 4096 bytes and its headers
SETUP_FAILED=125 # our own failures; everything else is the command's code

with='' verbose=0 dry=0 rung='' job_pid='' feeder='' run_dir=''
kernel='' kernel_dir=$CACHE/kernel # of the guest: what --kernel asked for, and where it lies
apt_source=()                      # apt's options for another suite than this machine's
helpers=() writable=("$ROOT/target")
nic_why='' rxe_why='' guest_why='' accel=''
say() { printf 'rxe-setup: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit "$SETUP_FAILED"
}
usage_error() {
    say "$*; see ./$SELF --help"
    exit 2
}
PATH=$PATH:/usr/sbin:/sbin # where users do not look for modprobe and ip
have() { command -v -- "$1" >/dev/null 2>&1; }

help() {
    cat <<'TXT'
Runs a command where there is an RDMA (verbs) device.

    ./rxe-setup.sh [OPTIONS] -- CMD [ARG...]   run CMD
    ./rxe-setup.sh [OPTIONS] up                prepare only, so that the next run starts fast
    ./rxe-setup.sh down                        remove what this script made
    ./rxe-setup.sh status                      say which rung would be taken, and why

The first rung that works is taken; stderr says which, and why not a better one:
    nic     a verbs device with an active port: CMD runs here, on it
    rxe     the kernel can load rdma_rxe: two dummy interfaces with an rxe device
            on each are made (they stay until "down"), CMD runs here
    guest   CMD runs in a small virtual machine (x86-64; Debian or Ubuntu kernel)
            with the devices rxe0 and rxe1, two NUMA nodes, 512 hugepages of
            2 MiB, one of 1 GiB and no memlock limit. Hardware virtualization is used if a
            short probe boot succeeds with it, else emulation (slower).

Options:
    --with nic|rxe|guest   take this rung or fail
    --kernel SUITE|DIR     the guest's kernel: that of another Debian suite (trixie), which
                           is fetched, or one that lies unpacked in a folder (with boot/
                           and lib/modules/); implies --with guest
    --write DIR            make this folder, and let the guest write to it; can be repeated
    -v, --verbose          show the guest's console and timings on stderr
    -h, --help             this text

In the guest:
    CMD's exit code, stdout, stderr and stdin (unless a terminal) are passed on.
    The host's files are there, read-only; the cargo target folder and those
    of --write can be written. /tmp shows the host's /tmp; what is written to
    it is lost.
    cargo run|test|bench compile here and only execute in the guest, one boot
    per command. Doctests and the test targets that Cargo.toml lists as
        [package.metadata.rxe-setup]
        native-tests = ["my_crate", "host_*"]
    need no device and run here, before the boot. Any other CMD runs as it is.
    What a cargo run's program writes to, after an option that Cargo.toml lists as
        output-folders = ["--html", "--plot"]
    is made and can be written, as if --write named it.
    CMD sees PINPOOL_GUEST=1, PATH, HOME and RUST_*, PINPOOL_*, RDMAV_*, IBV_*,
    LC_*, LD_LIBRARY_PATH and the like; RXE_SETUP_ENV="A B" passes on A and B.

Environment:
    RXE_SETUP_MEMORY   memory of the guest (default 6G, at least 4G), split over both nodes
    RXE_SETUP_CPUS     processors of the guest (default 2)

Missing packages are installed with apt (sudo is used for that alone, and to
make rxe devices and raise the memlock limit); without apt they are listed.
LIBCLANG_PATH is set to a libclang below 16, which rdma-sys needs. The guest's
kernel and tools live in target/rxe-setup and are never installed.

Exit code: CMD's; 2 for a wrong call; 125 if the setup failed.
TXT
}

# ---------------------------------------------------------------- processes

# What children read: no terminal, as background groups may not, and QEMU would
# change its settings.
if [[ -t 0 ]] || ! exec {input}<&0; then exec {input}</dev/null; fi 2>/dev/null

# Children get process groups of their own so that one signal ends all of a
# group: cargo and its compilers, or virtme-run and QEMU.
spawn() {
    set -m
    "$@" <&"$input" 8>&- & # the lock is this script's, not its children's
    job_pid=$!
    set +m
}
end_job() {
    [[ -n $job_pid ]] || return 0
    kill -TERM -- "-$job_pid" 2>/dev/null && sleep 0.3
    kill -KILL -- "-$job_pid" 2>/dev/null
    job_pid=''
}
cleanup() {
    end_job
    [[ -z $feeder ]] || kill "$feeder" "${helpers[@]}" 2>/dev/null
    helpers=() feeder=''
    [[ -n $run_dir ]] && rm -rf -- "$run_dir"
    run_dir=''
}
on_signal() {
    cleanup
    trap - EXIT "$1"
    kill -s "$1" "$$"
}
trap cleanup EXIT
trap 'on_signal INT' INT
trap 'on_signal TERM' TERM
trap 'on_signal HUP' HUP

# Runs a child in the background and waits, so that traps act at once.
run_child() {
    spawn "$@"
    wait "$job_pid"
    local rc=$?
    job_pid=''
    return "$rc"
}

can_root() {
    ((EUID == 0)) && return 0
    have sudo || return 1
    [[ -t 0 ]] || sudo -n true 2>/dev/null
}
as_root() {
    if ((EUID == 0)); then
        "$@"
    else
        say "sudo for: $*"
        sudo "$@"
    fi
}

# ----------------------------------------------------------------- packages

missing=()
need() { # PACKAGE WHAT-FOR TEST...
    local package=$1 purpose=$2
    shift 2
    "$@" >/dev/null 2>&1 || missing+=("$package ($purpose)")
}
provider_found() { compgen -G "/usr/lib*/libibverbs/librxe-rdmav*.so" ||
    compgen -G "/usr/lib/*/libibverbs/librxe-rdmav*.so"; }
busybox_static() {
    local linkage
    linkage=$(ldd "$(command -v busybox-static || command -v busybox)" 2>&1)
    [[ $linkage == *"not a dynamic"* || $linkage == *statically* ]]
}

apt_updated=0
apt_update() {
    ((apt_updated)) && return 0
    apt_updated=1
    say "updating the package lists"
    as_root apt-get -qq update >&2
}
apt_install() {
    local -a install=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "$@")
    apt_update
    as_root "${install[@]}" >&2 </dev/null
}

# Fills `missing` with what rung $1 lacks.
find_missing() {
    missing=()
    need build-essential "compiler" have g++
    need build-essential "compiler" have make
    need cmake "benchmark rivals" have cmake
    need pkg-config "finds libibverbs" have pkg-config
    if have pkg-config; then
        need libibverbs-dev "verbs" pkg-config --exists libibverbs
        need librdmacm-dev "verbs" pkg-config --exists librdmacm
    else
        missing+=("libibverbs-dev (verbs)" "librdmacm-dev (verbs)")
    fi
    need ibverbs-providers "verbs drivers" provider_found
    need ibverbs-utils "ibv_devinfo" have ibv_devinfo
    need jq "reads cargo's messages" have jq
    [[ $1 == nic ]] && return
    need iproute2 "makes rxe devices" have rdma
    need kmod "loads kernel modules" have modprobe
    [[ $1 == rxe ]] && return
    need qemu-system-x86 "the guest" have qemu-system-x86_64
    need busybox-static "the guest" busybox_static
    need python3-venv "virtme-ng, which starts the guest" python3 -c 'import ensurepip, venv'
}

install_missing() {
    local -a packages
    have cargo || [[ ${cmd[0]-} != cargo ]] ||
        die "there is no cargo: install Rust with rustup (https://rustup.rs), then run this again"
    find_missing "$1"
    if ((${#missing[@]})); then
        have apt-get || die "no apt-get here; install what these Debian packages hold, then run this again: ${missing[*]}"
        can_root || die "neither root nor sudo, so install these packages yourself: ${missing[*]}"
        say "installing: ${missing[*]}"
        mapfile -t packages < <(printf '%s\n' "${missing[@]%% *}" | sort -u)
        apt_install "${packages[@]}" || die "apt-get could not install: ${packages[*]}"
    fi
    setup_libclang || install_libclang
}

# rdma-sys 0.3 has a bindgen whose output is broken with libclang >= 16.
setup_libclang() {
    local version lib
    [[ -n ${LIBCLANG_PATH-} ]] && return 0
    for version in 14 15 13 12 11 10 9; do
        for lib in "/usr/lib/llvm-$version/lib" "/usr/lib64/llvm$version/lib" "/usr/lib/llvm$version/lib"; do
            compgen -G "$lib/libclang*.so*" >/dev/null || continue
            export LIBCLANG_PATH=$lib
            compgen -G "$lib/clang/*/include/stddef.h" >/dev/null || use_gcc_headers
            return 0
        done
    done
    lib=$CACHE/libclang/clang/native
    [[ -e $lib/libclang.so ]] || return 1
    export LIBCLANG_PATH=$lib
    use_gcc_headers # the wheel has no headers of its own
}
use_gcc_headers() {
    local include
    include=$(gcc -print-file-name=include)
    export BINDGEN_EXTRA_CLANG_ARGS="${BINDGEN_EXTRA_CLANG_ARGS-} -I$include"
}
install_libclang() {
    local version
    if have apt-get && can_root; then
        apt_update
        for version in 14 15 13; do
            apt-cache show "libclang-$version-dev" >/dev/null 2>&1 || continue
            say "installing: libclang-$version-dev (rdma-sys needs a libclang below 16)"
            apt_install "libclang-$version-dev" && setup_libclang && return 0
        done
    fi
    have python3 || die "rdma-sys needs a libclang below 16: set LIBCLANG_PATH to one"
    say "fetching libclang $LIBCLANG_WHEEL into ${CACHE#"$ROOT"/} (rdma-sys needs one below 16)"
    make_venv
    "$CACHE/venv/bin/python" -m pip -q --disable-pip-version-check install --no-deps --target "$CACHE/libclang" \
        "libclang==$LIBCLANG_WHEEL" >&2 || die "pip could not install libclang"
    setup_libclang || die "the libclang package holds no libclang.so"
}
make_venv() {
    "$CACHE/venv/bin/python" -m pip --version >/dev/null 2>&1 && return 0
    rm -rf -- "$CACHE/venv"
    python3 -m venv "$CACHE/venv" >&2 || die "python3 could not make a virtual environment (package python3-venv)"
}

# One preparation at a time; the lock goes with the process.
prepare() {
    mkdir -p -- "$CACHE" || die "cannot make $CACHE"
    exec 9>"$CACHE/prepare.lock"
    if ! flock -n 9; then
        say "waiting for another preparation to end"
        flock 9
    fi
    # Held as long as this process lives: "down" asks for it.
    exec 8>"$CACHE/in-use.lock"
    flock -s 8
    install_missing "$rung"
    [[ $rung == rxe ]] && make_rxe
    [[ $rung == guest ]] && prepare_guest
    exec 9>&-
}

# -------------------------------------------------------------------- rungs

our_netdevs() {
    local alias
    for alias in /sys/class/net/*/ifalias; do
        grep -q "^$MARK" "$alias" 2>/dev/null && basename "$(dirname "$alias")"
    done
}
rxe_on() { # NETDEV -> its rxe device
    rdma link show 2>/dev/null | sed -n "s|^link \([^/]*\)/.* netdev $1 *\$|\1|p"
}
our_rxes() {
    local dev
    have rdma || return 0
    for dev in $(our_netdevs); do rxe_on "$dev"; done
}

check_nic() {
    local dir dev uverbs ours
    ours=" $(our_rxes | tr '\n' ' ')"
    nic_why="there is no verbs device"
    for dir in /sys/class/infiniband/*/; do
        dev=$(basename "$dir")
        [[ -d $dir && $ours != *" $dev "* ]] || continue
        grep -qs ACTIVE "$dir"ports/*/state || {
            nic_why="$dev has no active port"
            continue
        }
        uverbs=$(grep -lsx "$dev" /sys/class/infiniband_verbs/*/ibdev | head -n 1)
        uverbs=/dev/infiniband/$(basename "$(dirname "${uverbs:-/none/none}")")
        if [[ -r $uverbs && -w $uverbs ]]; then
            nic_why="$dev has an active port"
            return 0
        fi
        nic_why="$dev is active, but $uverbs cannot be opened by $(id -un)"
    done
    return 1
}

check_rxe() {
    local release
    release=$(uname -r)
    if [[ -n $(our_rxes) ]]; then
        rxe_why="made before: $(our_rxes | tr '\n' ' ')"
    elif [[ ! -d /sys/module/rdma_rxe ]] && ! { have modprobe && modprobe -nq rdma_rxe; } 2>/dev/null &&
        ! compgen -G "/lib/modules/$release/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*" >/dev/null; then
        rxe_why="kernel $release has no loadable rdma_rxe"
        return 1
    elif ! can_root; then
        rxe_why="kernel $release has rdma_rxe, but making a device needs root or sudo"
        return 1
    elif ((dry)); then
        rxe_why="kernel $release has rdma_rxe"
    elif ! { have modprobe || apt_install kmod; } || ! as_root modprobe -q rdma_rxe; then
        rxe_why="kernel $release has rdma_rxe, but loading it failed"
        return 1
    else
        rxe_why="kernel $release has rdma_rxe"
    fi
}

check_guest() {
    guest_why="possible on any x86-64 machine"
    if [[ $ROOT == *[,[:space:]]* ]]; then
        guest_why="the guest needs a path without spaces and commas, this is $ROOT"
        return 1
    fi
    [[ $(uname -m) == x86_64 ]] && return 0
    guest_why="the guest is x86-64 only, this is $(uname -m)"
    return 1
}

choose_rung() {
    rung=$with
    if [[ -n $with ]]; then
        local why="${with}_why"
        "check_$with" || die "--with $with is not possible: ${!why}"
        say "rung $with, as asked: ${!why}"
    elif check_nic; then
        rung=nic
        say "rung nic: $nic_why"
    elif check_rxe; then
        rung=rxe
        say "rung rxe: $rxe_why (nic: $nic_why)"
    elif check_guest; then
        rung=guest
        say "rung guest (nic: $nic_why; rxe: $rxe_why)"
    else
        die "no RDMA device can be had (nic: $nic_why; rxe: $rxe_why; guest: $guest_why)"
    fi
}

make_rxe() {
    local i name next=0 made
    [[ -n $(our_rxes) ]] && return 0
    as_root modprobe -a dummy rdma_rxe ib_uverbs || die "modprobe failed"
    for i in 0 1; do
        # /32: a wider mask could hide a network that the host really uses
        if ! as_root ip link add "pinrx$i" mtu "$MTU" type dummy ||
            ! as_root ip link set "pinrx$i" alias "$MARK" ||
            ! as_root ip addr add "10.77.$i.1/32" dev "pinrx$i" ||
            ! as_root ip link set "pinrx$i" up; then
            die "could not make the dummy interface pinrx$i; './$SELF down' cleans up"
        fi
        while [[ -e /sys/class/infiniband/rxe$next ]]; do next=$((next + 1)); done
        name=rxe$next
        as_root rdma link add "$name" type rxe netdev "pinrx$i" || die "could not make the rxe device $name; './$SELF down' cleans up"
        made="${made-} $name"
    done
    say "made$made on pinrx0 pinrx1; they stay until './$SELF down'"
}

# nic and rxe: the command as it is, in this very process.
run_here() {
    if [[ $(ulimit -l) != unlimited ]]; then
        if can_root && as_root prlimit --pid "$$" --memlock=unlimited:unlimited 2>/dev/null; then
            say "raised the memlock limit of this command to unlimited"
        else
            say "the memlock limit is $(ulimit -l) KiB and could not be raised"
        fi
    fi
    exec 8>&- {input}<&-
    trap - EXIT INT TERM HUP
    exec "${cmd[@]}"
}

# -------------------------------------------------------------------- guest

prepare_guest() {
    local log=$CACHE/pip.log
    if [[ ! -e $CACHE/venv/virtme-ng-$VIRTME_NG ]]; then
        say "fetching virtme-ng $VIRTME_NG into ${CACHE#"$ROOT"/}"
        make_venv
        "$CACHE/venv/bin/python" -m pip -q --disable-pip-version-check install "virtme-ng==$VIRTME_NG" >"$log" 2>&1 || {
            cat "$log" >&2
            die "pip could not install virtme-ng"
        }
        touch "$CACHE/venv/virtme-ng-$VIRTME_NG"
    fi
    choose_kernel
    make_shims
    probe_kvm
}

choose_kernel() {
    local -a images
    if [[ $kernel == */* ]]; then
        kernel_dir=$(cd -- "$kernel" 2>/dev/null && pwd -P) || die "there is no folder $kernel"
        images=("$kernel_dir"/boot/vmlinuz-*)
        [[ ${#images[@]} == 1 && -e ${images[0]} ]] || die "$kernel must hold one boot/vmlinuz-RELEASE"
        kernel_release=${images[0]##*/vmlinuz-}
        [[ -e $kernel_dir/lib/modules/$kernel_release/modules.dep ]] ||
            depmod -b "$kernel_dir" "$kernel_release" || die "$kernel has no usable lib/modules/$kernel_release"
        return
    fi
    [[ -z $kernel ]] || kernel_dir=$CACHE/kernel-$kernel
    if [[ ! -e $kernel_dir/ok ]]; then
        [[ -z $kernel ]] || use_suite "$kernel"
        fetch_kernel
    fi
    kernel_release=$(<"$kernel_dir/ok")
}

# Lists of another suite, from the mirror that this machine's apt uses, in a place of their own: the machine's
# packages stay what they are.
use_suite() { # SUITE
    local mirror keys=/usr/share/keyrings/debian-archive-keyring.gpg dir=$CACHE/apt-$1
    # shellcheck disable=SC2016 # apt's own
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 2>/dev/null |
        grep -m 1 '/debian/*$')
    [[ -n $mirror ]] || die "apt knows no mirror of Debian, so unpack a kernel and give its folder: --kernel DIR"
    [[ -e $keys ]] || apt_install debian-archive-keyring || die "apt-get could not install debian-archive-keyring"
    mkdir -p -- "$dir/lists/partial" "$dir/cache/archives/partial" || die "cannot make $dir"
    echo "deb [signed-by=$keys] $mirror $1 main" >"$dir/sources.list"
    apt_source=(-o "Dir::Etc::SourceList=$dir/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$dir/lists" -o "Dir::Cache=$dir/cache" -o "APT::Sandbox::User=$(id -un)")
    say "updating the package lists of $1"
    apt-get -qq "${apt_source[@]}" update >&2 || die "the package lists of $1 could not be had"
    apt_updated=1
}

# Unpacks the distribution's kernel beside the project; apt checks what it gets.
fetch_kernel() {
    local meta release dir=$kernel_dir package
    local -a packages
    for meta in linux-image-amd64 linux-image-generic; do # Debian, Ubuntu
        release=$(kernel_of "$meta")
        [[ -n $release ]] && break
        apt_update
        release=$(kernel_of "$meta")
        [[ -n $release ]] && break
    done
    [[ -n $release ]] || die "apt offers no kernel for the guest (linux-image-amd64 or linux-image-generic)"
    packages=("linux-image-$release")
    for package in "linux-modules-$release" "linux-modules-extra-$release"; do # Ubuntu's are split
        apt-cache "${apt_source[@]}" show "$package" >/dev/null 2>&1 && packages+=("$package")
    done
    say "fetching the guest's kernel $release into ${CACHE#"$ROOT"/}"
    rm -rf -- "$dir"
    mkdir -p -- "$dir"
    download_packages "$dir" "${packages[@]}" || {
        apt_update
        download_packages "$dir" "${packages[@]}"
    } || die "apt-get could not download: ${packages[*]}"
    for package in "$dir"/*.deb; do
        dpkg -x "$package" "$dir" || die "dpkg could not unpack $package"
    done
    rm -f -- "$dir"/*.deb
    [[ -d $dir/lib/modules ]] || ln -s usr/lib "$dir/lib" # since Debian 13
    depmod -b "$dir" "$release" || die "depmod failed"
    [[ -n $(find "$dir/lib/modules/$release" -name 'rdma_rxe.ko*') ]] || die "kernel $release has no rdma_rxe"
    [[ -e $dir/boot/vmlinuz-$release ]] || die "kernel $release has no boot/vmlinuz"
    echo "$release" >"$dir/ok"
}
kernel_of() { # META-PACKAGE -> release
    apt-cache "${apt_source[@]}" depends "$1" 2>/dev/null | sed -n 's/^ *Depends: linux-image-\([0-9].*\)/\1/p' | head -n 1
}
download_packages() {
    (cd -- "$1" && shift && apt-get -qq "${apt_source[@]}" -o APT::Sandbox::User="$(id -un)" download "$@" >&2)
}

make_shims() {
    local shims=$CACHE/shims
    [[ -x $shims/qemu ]] && return 0
    mkdir -p -- "$shims"
    # Both cost the emulated guest seconds and give it nothing. Its init finds
    # these first, through PATH on the kernel's command line.
    ln -sf /bin/true "$shims/systemd-tmpfiles"
    ln -sf /bin/true "$shims/udevadm"
    # QEMU goes when virtme-run goes, whatever ended that.
    printf '#!/bin/sh\nexec setpriv --pdeathsig KILL qemu-system-x86_64 "$@"\n' >"$shims/qemu"
    chmod +x "$shims/qemu"
}

# Some machines have a /dev/kvm with which such a guest aborts or hangs, so the
# only test is to boot one. The answer holds until the machine boots again.
probe_kvm() {
    local boot answer
    boot=$(cat /proc/sys/kernel/random/boot_id)
    accel=emulated
    [[ -r /dev/kvm && -w /dev/kvm ]] || return 0
    if [[ -e $CACHE/kvm ]]; then
        read -r answer accel <"$CACHE/kvm"
        [[ $answer == "$boot" ]] && return 0
    fi
    say "trying a boot with hardware virtualization (at most $KVM_PROBE_SECONDS s)"
    new_run_dir
    guest_script 'dmesg | grep -q "Hypervisor detected: KVM"'
    accel=kvm
    boot_guest "$KVM_PROBE_SECONDS" </dev/null >/dev/null 2>&1 || accel=emulated
    cleanup
    [[ $accel == kvm ]] || say "it did not come up: emulation it is"
    echo "$boot $accel" >"$CACHE/kvm"
}

new_run_dir() {
    local old
    for old in "$CACHE"/run.*; do # of a run that was killed
        [[ -d $old && ! -d /proc/${old##*.} ]] && rm -rf -- "$old"
    done
    run_dir=$CACHE/run.$$
    (umask 077 && mkdir -- "$run_dir") || die "cannot make a folder in $CACHE"
}

mebibytes() {
    case $1 in
    *[0-9]G) echo $((${1%G} * 1024)) ;;
    *[0-9]M) echo "${1%M}" ;;
    *) usage_error "RXE_SETUP_MEMORY is '$1', not a size such as 6G or 5000M" ;;
    esac
}

# The script that is the guest's only job. stdin, stdout and stderr are virtio
# ports of their own, so that neither console nor kernel lines get among them.
# They are found by name in sysfs, as nothing makes links to them without udev.
guest_script() { # LINES-TO-RUN [DEVICES?]
    local name i
    {
        cat <<'GUEST'
port() {
    local file
    for file in /sys/class/virtio-ports/*/name; do
        [[ $(<"$file") == "$1" ]] && file=${file%/name} && echo "/dev/${file##*/}"
    done
}
exec 7>"$(port rxe.code)"
[[ -c /proc/self/fd/0 && ! -t 0 ]] || exec <"$(port virtme.stdin)"
exec >"$(port rxe.out)" 2>"$(port rxe.err)"
finish() { echo "$1" >&7; exit; }
trouble() { echo "rxe-setup: in the guest: $*" >&2; finish 125; }
# virtme-ng's own mounts have no cache: in those, each page fault in a program
# takes 0.5 ms, which is 10 s for a large test program.
share() { # TAG FOLDER OPTIONS
    mount -t 9p -o "trans=virtio,version=9p2000.L,access=any,msize=512000,$3" "$1" "$2" || trouble "cannot mount $2"
}
devices() { # few processes: starting one takes an emulated guest 0.1 s
    local i n gid
    modprobe -qd "$1" -a dummy crc32_generic ib_uverbs rdma_ucm rdma_rxe # the second is not in every kernel
    [[ -d /sys/module/rdma_rxe && -d /sys/module/ib_uverbs ]] || trouble "the kernel did not load rdma_rxe"
    ip -batch - <<<"link set lo up
        link add rx0 mtu $2 type dummy
        link add rx1 mtu $2 type dummy
        addr add 10.77.0.1/24 dev rx0
        addr add 10.77.1.1/24 dev rx1
        link set rx0 up
        link set rx1 up" || trouble "could not make the dummy interfaces"
    rdma -b /dev/stdin <<<"link add rxe0 type rxe netdev rx0
        link add rxe1 type rxe netdev rx1" || trouble "could not make the rxe devices"
    for i in 0 1; do
        for ((n = 0; n < 100; n++)); do # the IPv4 address gets into the GID table a little later
            read -r gid </sys/class/infiniband/rxe$i/ports/1/gids/1 && [[ $gid == *ffff:0a4d:0${i}01 ]] && break
            sleep 0.05
        done 2>/dev/null
    done
}
echo up >&7
ulimit -l unlimited
GUEST
        echo 'share rxe_usr /usr ro,cache=loose'
        for ((i = 0; i < ${#writable[@]}; i++)); do
            printf 'share rxe_dir%s %q rw,cache=mmap\n' "$i" "${writable[i]}"
        done
        printf 'export PINPOOL_GUEST=1\n'
        for name in $(compgen -e); do
            case " PATH HOME USER LANG TERM CI NO_COLOR CLICOLOR CLICOLOR_FORCE LD_LIBRARY_PATH ${RXE_SETUP_ENV-} " in
            *" $name "*) ;;
            *) [[ $name =~ ^(RUST_|PINPOOL_|RDMAV_|IBV_|MLX5_|LC_|CARGO_TERM_) ]] || continue ;;
            esac
            printf 'export %s=%q\n' "$name" "${!name}"
        done
        [[ -n ${2-} ]] && printf 'devices %q %q\n' "$kernel_dir" "$MTU"
        # shellcheck disable=SC2016 # expanded in the guest
        ((verbose)) && echo 'read -r n rest </proc/uptime; echo "rxe-setup: the guest is ready, $n s after its start" >&2'
        printf 'cd -- %q || trouble "the folder %q is not there"\n' "$PWD" "$PWD"
        printf '%s\nfinish $?\n' "$1"
    } >"$run_dir/init"
}

# Boots, runs $run_dir/init, gives its exit code. With SECONDS, at most so long.
boot_guest() { # [SECONDS]
    local memory half cpus node0 node1 i started=$SECONDS limit=${1-} code
    local -a run kernel_options
    memory=$(mebibytes "${RXE_SETUP_MEMORY-6G}") || exit 2
    cpus=${RXE_SETUP_CPUS-2}
    [[ $cpus =~ ^[1-9][0-9]*$ ]] || usage_error "RXE_SETUP_CPUS is '$cpus', not a number"
    half=$((memory / 2))
    node0=${half}M,cpus=0 node1=${half}M
    if ((cpus > 1)); then
        node0=${half}M,cpus=0-$((cpus / 2 - 1)) node1=${half}M,cpus=$((cpus / 2))-$((cpus - 1))
    fi
    # Zeroing, mitigations and self-tests cost an emulated boot 6 s. Where the kernel lies is not left to chance, lest it
    # take the last whole GiB.
    kernel_options=("PATH=$CACHE/shims:/usr/sbin:/usr/bin:/sbin:/bin" hugepagesz=2M hugepages=512
        hugepagesz=1G hugepages=1 nokaslr init_on_alloc=0
        mitigations=off rcupdate.rcu_expedited=1 apparmor=0 audit=0 cryptomgr.notests nmi_watchdog=0)
    run=(env "TMPDIR=$run_dir" setpriv --pdeathsig KILL "$CACHE/venv/bin/python" "$CACHE/venv/bin/virtme-run"
        --kimg "$kernel_dir/boot/vmlinuz-$kernel_release" --mods auto --force-9p
        --memory "$((half * 2))M" --cpus "$cpus,sockets=$cpus" --numa "$node0" --numa "$node1"
        --qemu-bin "$CACHE/shims/qemu" --show-boot-console
        "${kernel_options[@]/#/--kopt=}"
        --overlay-rwdir /tmp --script-sh "exec bash $run_dir/init")
    [[ $accel == kvm ]] || run+=(--disable-kvm)
    ((verbose)) && run+=(--verbose)
    run+=(--qemu-opts -fsdev "local,id=rxe_usr,path=/usr,security_model=none,multidevs=remap,readonly=on"
        -device "virtio-9p-pci,fsdev=rxe_usr,mount_tag=rxe_usr")
    # Emulated, "rep movsb" copies byte by byte, and nobody takes it for the fast way without the first two
    # flags; a fifth level of page tables and the toggling of SMAP cost time and give a guest nothing.
    [[ $accel == kvm ]] || run+=(-cpu "max,erms=off,fsrm=off,la57=off,smap=off")
    for ((i = 0; i < ${#writable[@]}; i++)); do
        run+=(-fsdev "local,id=rxe_dir$i,path=${writable[i]},security_model=none,multidevs=remap"
            -device "virtio-9p-pci,fsdev=rxe_dir$i,mount_tag=rxe_dir$i")
    done
    run+=(-device "virtio-serial-pci,id=rxe"
        -chardev "file,id=rxe_code,path=$run_dir/code" -device "virtserialport,bus=rxe.0,chardev=rxe_code,name=rxe.code"
        -chardev "file,id=rxe_out,path=$run_dir/out" -device "virtserialport,bus=rxe.0,chardev=rxe_out,name=rxe.out")

    # FIFOs, as QEMU would truncate a file, and could not open a socket.
    local -a copy=(setpriv --pdeathsig KILL cat)
    mkfifo "$run_dir/in" "$run_dir/out" "$run_dir/err" "$run_dir/log" || die "cannot make FIFOs in $CACHE"
    "${copy[@]}" "$run_dir/out" &
    helpers=($!)
    if [[ /proc/self/fd/1 -ef /proc/self/fd/2 ]]; then
        # one reader, so that the order of the lines is kept
        run+=(-chardev "file,id=rxe_err,path=$run_dir/out")
    else
        "${copy[@]}" "$run_dir/err" >&2 &
        helpers+=($!)
        run+=(-chardev "file,id=rxe_err,path=$run_dir/err")
    fi
    run+=(-device "virtserialport,bus=rxe.0,chardev=rxe_err,name=rxe.err")
    local console=$run_dir/console
    ((verbose)) && console=/proc/self/fd/2
    "${copy[@]}" "$run_dir/log" >>"$console" &
    helpers+=($!)
    # shellcheck disable=SC2016 # $1 is the inner shell's
    "${copy[@]::3}" sh -c 'exec cat >"$1"' sh "$run_dir/in" <&"$input" &
    feeder=$!

    start_guest() { exec "${run[@]}" <"$run_dir/in" >"$run_dir/log" 2>&1; }
    spawn start_guest
    if [[ -n $limit ]]; then
        while kill -0 "$job_pid" 2>/dev/null && ((SECONDS - started < limit)); do sleep 0.2; done
        end_job
    else
        wait "$job_pid"
        job_pid=''
    fi
    kill "$feeder" 2>/dev/null
    wait "${helpers[@]}" 2>/dev/null
    helpers=() feeder=''
    code=$(tail -n 1 "$run_dir/code" 2>/dev/null)
    ((verbose)) && say "the guest ran for $((SECONDS - started)) s ($accel)"
    [[ $code =~ ^[0-9]+$ ]] && return "$code"
    [[ -n $limit ]] && return "$SETUP_FAILED"
    rm -f -- "$CACHE/kvm" # probe again, should that be why
    [[ -e $run_dir/console ]] && tail -n 20 "$run_dir/console" >&2
    if [[ $code == up ]]; then
        die "the guest ended before the command did (its console is above)"
    else
        die "the guest did not come up (its console is above)"
    fi
}

run_in_guest() { # LINES
    say "starting the guest ($accel)"
    new_run_dir
    guest_script "$1" devices
    boot_guest
}

# -------------------------------------------------------------------- cargo

# Splits what follows the subcommand: `options`, the first free word and all
# after it (`free`), what follows "--" (`after`).
split_cargo_args() {
    local arg
    options=() free=() after=()
    while (($#)); do
        arg=$1
        shift
        case $arg in
        --)
            after=("$@")
            return
            ;;
        -p | --package | --exclude | --bin | --example | --test | --bench | -F | --features | -j | --jobs | --profile | \
            --target | --target-dir | --manifest-path | --message-format | --color | --config | -Z | -C | --lockfile-path)
            options+=("$arg" "${@:1:1}")
            shift
            ;;
        -*) options+=("$arg") ;;
        *)
            free=("$arg")
            if [[ $subcommand == run ]]; then
                free+=("$@")
                return
            fi
            ;;
        esac
    done
}
has_option() { # OPTION...: is one of them in `options`?
    local option wanted
    for option in "${options[@]}"; do
        for wanted in "$@"; do [[ $option == "$wanted" || $option == "$wanted="* ]] && return 0; done
    done
    return 1
}
quoted() {
    local words
    printf -v words ' %q' "$@"
    echo "${words# }"
}

run_cargo() {
    local -a cargo=("${cmd[0]}") options free after rest
    local subcommand='' i messages metadata
    for ((i = 1; i < ${#cmd[@]}; i++)); do
        case ${cmd[i]} in
        --color | --config | -Z | -C)
            cargo+=("${cmd[i]}" "${cmd[i + 1]-}")
            i=$((i + 1))
            ;;
        +* | -*) cargo+=("${cmd[i]}") ;;
        *)
            subcommand=${cmd[i]}
            break
            ;;
        esac
    done
    rest=("${cmd[@]:i+1}")
    case $subcommand in
    run | r) subcommand='run' ;;
    test | t) subcommand='test' ;;
    bench) ;;
    *)
        run_in_guest "$(quoted "${cmd[@]}")"
        return
        ;;
    esac
    split_cargo_args "${rest[@]}"
    has_option --message-format && usage_error "cargo --message-format is not supported in the guest"
    if has_option --no-run --doc --help -h; then
        run_child "${cmd[@]}"
        return
    fi
    new_run_dir
    messages=$run_dir/messages
    metadata=$run_dir/metadata
    local -a manifest=()
    for ((i = 0; i < ${#options[@]}; i++)); do
        case ${options[i]} in
        --manifest-path) manifest=("${options[@]:i:2}") ;;
        --manifest-path=*) manifest=("${options[i]}") ;;
        esac
    done
    "${cargo[@]}" metadata --no-deps --format-version 1 "${manifest[@]}" >"$metadata" || return
    add_writable "$(jq -r .target_directory "$metadata")"
    "cargo_$([[ $subcommand == run ]] && echo run || echo test)"
}

cargo_build() { # SUBCOMMAND... -> $messages
    run_child "${cargo[@]}" "$@" --message-format=json-render-diagnostics "${options[@]}" >"$messages" </dev/null
}

cargo_run() {
    local executable wanted='' default i
    local -a found
    default=$(jq -r '[.packages[].default_run | select(. != null)] | first // empty' "$metadata")
    if ! has_option --bin --example && [[ -n $default ]]; then
        options+=(--bin "$default")
    fi
    cargo_build build || return
    for ((i = 0; i < ${#options[@]}; i++)); do
        case ${options[i]} in
        --bin | --example) wanted=${options[i + 1]-} ;;
        --bin=* | --example=*) wanted=${options[i]#*=} ;;
        esac
    done
    mapfile -t found < <(jq -r --arg wanted "$wanted" 'select(.reason == "compiler-artifact" and .executable != null
        and (.target.kind | index("bin") or index("example")) and ($wanted == "" or .target.name == $wanted)) | .executable' "$messages")
    if ((${#found[@]} == 0)); then # cargo says best what is wrong
        run_child "${cmd[@]}"
        return
    fi
    ((${#found[@]} == 1)) || usage_error "cargo run: ${#found[@]} programs match, choose one with --bin or --example"
    executable=${found[0]}
    share_outputs "${free[@]}" "${after[@]}"
    has_option -q --quiet || printf "     Running \`%s\`\n" "$(quoted "${executable#"$PWD"/}" "${free[@]}" "${after[@]}")" >&2
    rm -rf -- "$run_dir"
    run_in_guest "$(quoted "$executable" "${free[@]}" "${after[@]}")"
}

# Lets the guest write to the folders that the program's options name.
share_outputs() { # ARG...
    local -a names
    local name
    mapfile -t names < <(jq -r '.packages[].metadata["rxe-setup"]?["output-folders"]?[]?' "$metadata")
    while (($#)); do
        for name in "${names[@]}"; do
            if [[ $1 == "$name="?* ]]; then
                add_writable "${1#*=}"
            elif [[ $1 == "$name" && -n ${2-} ]]; then
                add_writable "$2"
            fi
        done
        shift
    done
}

# Runs one test program as cargo does. Used here and, as text, in the guest.
one_test() { # LABEL RERUN NAME VERSION DIR EXECUTABLE [ARG...]
    local label=$1 rerun=$2 code
    [[ -z $label ]] || printf '     Running %s\n' "$label" >&2
    (
        export CARGO_PKG_NAME=$3 CARGO_PKG_VERSION=$4 CARGO_MANIFEST_DIR=$5
        cd -- "$5" || exit
        shift 5
        exec "$@"
    )
    code=$?
    ((code == 0)) && return
    ((code == 101)) || printf '\nCaused by:\n  the program ended with code %s\n' "$code" >&2
    printf "error: test failed, to rerun pass \`%s\`\n" "$rerun" >&2
    return 101
}
is_native() { # TARGET KIND
    local pattern
    [[ $2 == bench || $subcommand == bench ]] && return 1
    # shellcheck disable=SC2053 # a glob is meant
    for pattern in "${native[@]}"; do [[ $1 == $pattern ]] && return 0; done
    return 1
}

cargo_test() {
    local kind target executable dir source name version label rerun failed=0 lines='' doctest
    local -a native arguments test_list programs
    cargo_build "$subcommand" --no-run || return
    mapfile -t native < <(jq -r '.packages[].metadata["rxe-setup"]?["native-tests"]?[]?' "$metadata")
    mapfile -t test_list < <(jq -rn --slurpfile metadata "$metadata" '
        [inputs | select(.reason == "compiler-artifact" and .executable != null and .profile.test)]
        | sort_by(.manifest_path, (.target.kind[0] as $k | ["lib", "bin", "example", "test", "bench"] | index($k) // 0), .target.name)
        | .[] | . as $test | ($metadata[0].packages[] | select(.manifest_path == $test.manifest_path))
        | [$test.target.kind[0], $test.target.name, $test.executable, ($test.manifest_path | rtrimstr("/Cargo.toml")),
           $test.target.src_path, .name, .version] | @tsv' "$messages")
    mapfile -t programs < <(jq -r 'select(.reason == "compiler-artifact" and .executable != null and (.profile.test | not)
        and (.target.kind | index("bin"))) | "CARGO_BIN_EXE_\(.target.name)=\(.executable)"' "$messages")
    ((${#programs[@]})) && programs=(env "${programs[@]}")
    doctest=$(jq -rn --slurpfile metadata "$metadata" 'first(inputs | select(.reason == "compiler-artifact" and .target.doctest)
        | select(.manifest_path as $path | $metadata[0].packages | any(.manifest_path == $path)) | .target.name) // empty' "$messages")
    if [[ $subcommand == bench ]] || has_option --lib --bins --bin --examples --example --tests --test --benches --bench --all-targets; then
        doctest=''
    fi
    rm -rf -- "$run_dir"
    arguments=("${free[@]}" "${after[@]}")
    [[ $subcommand == bench ]] && arguments+=(--bench)

    lines="$(declare -f one_test)"$'\nfailed=0\n'
    local guest_tests=0 on_failure=failed=101
    has_option --no-fail-fast || on_failure='finish 101'
    for ((i = 0; i < ${#test_list[@]}; i++)); do
        IFS=$'\t' read -r kind target executable dir source name version <<<"${test_list[i]}"
        case $kind in
        test | bench) rerun="--$kind $target" label='' ;;
        example) rerun="--example $target" label='unittests ' ;;
        bin) rerun="--bin $target" label='unittests ' ;;
        *) rerun=--lib label='unittests ' ;;
        esac
        label+="${source#"$dir"/} (${executable#"$PWD"/})"
        has_option -q --quiet && label=''
        set -- "$label" "$rerun" "$name" "$version" "$dir" "${programs[@]}" "$executable" "${arguments[@]}"
        if is_native "$target" "$kind"; then
            if ! run_child one_test "$@"; then
                failed=101
                has_option --no-fail-fast || return 101
            fi
        else
            guest_tests=$((guest_tests + 1))
            lines+="one_test $(quoted "$@") || $on_failure"$'\n'
        fi
    done
    if [[ -n $doctest ]] && ! run_child "${cargo[@]}" test --doc "${options[@]}" "${free[@]}" -- "${after[@]}"; then
        failed=101
        has_option --no-fail-fast || return 101
    fi
    if ((guest_tests)); then
        run_in_guest "$lines(exit \$failed)" || failed=$?
    fi
    return "$failed"
}

add_writable() { # DIR
    local dir known
    mkdir -p -- "$1" || die "the folder $1 cannot be made"
    dir=$(cd -- "$1" && pwd -P) || die "the folder $1 cannot be entered"
    [[ $dir == *[,[:space:]]* ]] && die "the guest needs folders without spaces and commas, not $dir"
    for known in "${writable[@]}"; do [[ $dir/ == "$known/"* ]] && return; done
    writable+=("$dir")
}

# --------------------------------------------------------------------- main

up() {
    choose_rung
    prepare
    say "ready"
}

down() {
    local dev
    local -a devices
    mapfile -t devices < <(our_netdevs)
    if ((${#devices[@]})); then
        can_root || die "removing ${devices[*]} needs root or sudo"
        for dev in $(our_rxes); do as_root rdma link delete "$dev" && say "removed $dev"; done
        for dev in "${devices[@]}"; do as_root ip link delete "$dev" && say "removed $dev"; done
    fi
    if [[ -d $CACHE ]]; then
        exec 8>"$CACHE/in-use.lock"
        flock -n -x 8 || die "another run of this script is still using ${CACHE#"$ROOT"/}"
        rm -rf -- "$CACHE" || die "could not remove $CACHE"
        say "removed ${CACHE#"$ROOT"/}"
    fi
    say "installed packages stay"
}

status() {
    local name would='none'
    dry=1
    check_guest && would=guest
    check_rxe && would=rxe
    check_nic && would=nic
    [[ -n $with ]] && would="$with (as asked)"
    echo "would take: $would"
    for name in nic rxe guest; do
        local why="${name}_why"
        printf '%-11s %s\n' "$name:" "${!why}"
    done
    printf '%-11s %s\n' "made here:" "$({ our_netdevs; our_rxes; } | paste -sd ' ')"
    find_missing "${would%% *}"
    printf '%-11s %s\n' "missing:" "${missing[*]:-nothing}"
    setup_libclang
    printf '%-11s %s\n' "libclang:" "${LIBCLANG_PATH:-none below 16}"
    printf '%-11s %s\n' "kernel:" \
        "$([[ $kernel == */* ]] && echo "in $kernel" || cat "$CACHE/kernel${kernel:+-$kernel}/ok" 2>/dev/null || echo "not fetched yet")"
    printf '%-11s %s\n' "virtme-ng:" "$([[ -e $CACHE/venv/virtme-ng-$VIRTME_NG ]] && echo "$VIRTME_NG" || echo "not fetched yet")"
    printf '%-11s %s\n' "guest runs:" "$(cut -d ' ' -f 2 "$CACHE/kvm" 2>/dev/null || echo "not tried yet")"
}

main() {
    local action='' dir
    local -a write=()
    cmd=()
    while (($#)); do
        case $1 in
        -h | --help) help && exit ;;
        -v | --verbose) verbose=1 ;;
        --with=*) with=${1#*=} ;;
        --with)
            (($# > 1)) || usage_error "--with needs nic, rxe or guest"
            with=$2
            shift
            ;;
        --kernel=*) kernel=${1#*=} ;;
        --kernel)
            (($# > 1)) || usage_error "--kernel needs a suite of Debian's or a folder"
            kernel=$2
            shift
            ;;
        --write=*) write+=("${1#*=}") ;;
        --write)
            (($# > 1)) || usage_error "--write needs a folder"
            write+=("$2")
            shift
            ;;
        --)
            shift
            cmd=("$@")
            (($#)) || usage_error "there is no command after --"
            [[ -z $action ]] || usage_error "'$action' takes no command"
            action=run
            break
            ;;
        up | down | status)
            [[ -z $action ]] || usage_error "'$action' and '$1' together make no sense"
            action=$1
            ;;
        -*) usage_error "unknown option '$1'" ;;
        *) usage_error "unexpected '$1': a command goes after --" ;;
        esac
        shift
    done
    case $with in
    '' | nic | rxe | guest) ;;
    *) usage_error "--with $with: there are nic, rxe and guest" ;;
    esac
    if [[ -n $kernel ]]; then
        [[ -z $with || $with == guest ]] || usage_error "--kernel is the guest's, --with $with has none"
        [[ $kernel == */* || $kernel =~ ^[a-z][a-z0-9-]*$ ]] ||
            usage_error "--kernel is '$kernel', neither a suite of Debian's nor a folder (DIR/)"
        with=guest
    fi
    [[ -n $action ]] || usage_error "nothing to do: give up, down, status or -- CMD"
    if [[ $action != run ]]; then
        "$action"
        exit
    fi
    choose_rung
    prepare
    for dir in "${write[@]}"; do add_writable "$dir"; done
    [[ $rung == guest ]] || run_here
    if [[ $(basename -- "${cmd[0]}") == cargo ]]; then
        run_cargo
    else
        run_in_guest "$(quoted "${cmd[@]}")"
    fi
}

main "$@"; exit # on one line: the file may change meanwhile
