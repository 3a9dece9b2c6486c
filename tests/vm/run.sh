#!/usr/bin/env bash
# Run a command in a virtual machine that has RDMA devices.
#
#   bash tests/vm/run.sh                         all tests of the verbs transport, and the demo over it (checks.sh)
#   bash tests/vm/run.sh pytest -m verbs -x      any other command
#   bash tests/vm/run.sh --device rdma0 --device rdma1 COMMAND...
#
# The guest is Debian's kernel in QEMU, which emulates the processors unless --kvm is given. Its root file system is
# this machine's own, read only, with memory on top: COMMAND runs in the current folder and environment, on the same
# Python and the same build, and what it writes is gone at the end. Its RDMA devices are real ones to everything above
# the kernel: rdma_rxe, RoCE v2 in software. It has no other network.
#
# Output comes as it is written, the exit code is COMMAND's; 124: the time limit, 125: the machine itself failed.
#
# Needs Debian on x86-64 and the packages in packages.txt, and no rights. The kernel is fetched with apt-get the first
# time, 70 MB, and unpacked into the cache folder.
set -euo pipefail

HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# What the guest loads, in this order, each with what it needs.
MODULES=(virtio_pci virtio_console 9pnet_virtio 9p overlay crc32_generic dummy veth sch_netem ib_uverbs rdma_rxe)

usage() {
    cat <<'TEXT'
usage: run.sh [OPTION...] [COMMAND...]

Run COMMAND (all tests of the verbs transport) in a virtual machine with RDMA devices, over this machine's files.

  --device NETDEV    an RDMA device rxeN on this interface, N = 0, 1, ...; repeatable. veth0 and veth1 are two ends of
                     one wire, 10.77.100.1 and .2; any other name is an interface of its own, 10.77.N.1
                     (rdma0 veth0 veth1)
  --memory SIZE      of the guest, three quarters of it for what COMMAND writes (3G)
  --cpus N           of the guest (2)
  --timeout SECONDS  for all, the start included (900)
  --cache-dir DIR    keeps the kernel ($XDG_CACHE_HOME/aiodatadist, or ~/.cache/aiodatadist)
  --kvm              let the processor run the guest, where it can and /dev/kvm is open to this user: much faster
  --verbose          show the kernel's messages
  --help
TEXT
}

fail() {
    printf 'run.sh: %s\n' "$*" >&2
    exit 125
}

check_packages() {
    local package missing=()
    [[ $(uname -m) == x86_64 ]] || fail "the guest is an x86-64 machine, and this one is $(uname -m)"
    command -v dpkg-query apt-get >/dev/null || fail "this is no Debian: the kernel and the tools come from its packages"
    while read -r package _; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
    done < <(grep -v '^#' "$HERE/packages.txt")
    ((!${#missing[@]})) || fail "packages are missing: apt-get install --no-install-recommends ${missing[*]}"
}

# fetch_kernel FOLDER: Debian's present kernel, its modules and the order to load them in.
fetch_kernel() {
    local folder=$1 image version work
    image=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '$1 == "Depends:" { print $2; exit }')
    [[ -n $image ]] || fail "apt knows no linux-image-amd64: apt-get update"
    echo "run.sh: fetching $image" >&2
    work=$(mktemp -d "$folder.XXXXXX")
    # As this user: apt's own may not write here.
    (cd "$work" && apt-get -qq -o APT::Sandbox::User="$(id -un)" download "$image") || fail "cannot download $image"
    dpkg-deb --extract "$work"/*.deb "$work/image"
    rm "$work"/*.deb
    version=$(basename "$work"/image/boot/vmlinuz-*)
    version=${version#vmlinuz-}
    depmod --basedir "$work/image" "$version"
    mkdir "$work/kernel"
    mv "$work/image/boot/vmlinuz-$version" "$work/kernel/vmlinuz"
    pack_modules "$work/image" "$version" "$work/kernel/modules"
    rm -rf "$work/image"
    # Whoever is first wins, all are the same.
    mv -T "$work/kernel" "$folder" 2>/dev/null || true
    rm -rf "$work"
}

# pack_modules ROOT VERSION FOLDER: copies MODULES and what they need there, unpacked, and their order.
pack_modules() {
    local root=$1 version=$2 folder=$3 module path name
    mkdir "$folder"
    for module in "${MODULES[@]}"; do
        while read -r _ path _; do
            name=$(basename "${path%.xz}")
            [[ ! -e $folder/$name ]] || continue
            if [[ $path == *.xz ]]; then xz -dc "$path" >"$folder/$name"; else cp "$path" "$folder/$name"; fi
            echo "$name" >>"$folder/order"
        done < <(modprobe --dirname "$root" --set-version "$version" --show-depends "$module" | grep '^insmod' ||
            fail "kernel $version has no module $module")
    done
}

# make_initramfs KERNEL FILE
make_initramfs() {
    local work=$2.d program
    mkdir -p "$work"/{bin,proc,sys,dev,host,memory,root}
    cp -r "$1/modules" "$work/modules"
    cp /bin/busybox "$work/bin/busybox"
    for program in sh mount insmod mkdir ln chroot poweroff; do ln -s busybox "$work/bin/$program"; done
    install "$HERE/init.sh" "$work/init"
    (cd "$work" && find . | busybox cpio -o -H newc 2>/dev/null) >"$2"
}

DEVICES=() MEMORY=3G CPUS=2 LIMIT=900 VERBOSE='' ACCEL=tcg,thread=multi,tb-size=512
# What emulation does well: without AVX, of which QEMU 7.2 gets some wrong (numpy's argsort showed it), and without what
# has page tables walked for longer.
MODEL=Nehalem,+rdrand
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/aiodatadist
while [[ ${1:-} == -* ]]; do
    case $1 in
        --device | --memory | --cpus | --timeout | --cache-dir) [[ $# -gt 1 ]] || fail "$1 needs a value" ;;&
        --device) DEVICES+=("$2") ;;&
        --memory) MEMORY=$2 ;;&
        --cpus) CPUS=$2 ;;&
        --timeout) LIMIT=$2 ;;&
        --cache-dir) CACHE=$2 ;;&
        --device | --memory | --cpus | --timeout | --cache-dir) shift 2 ;;
        --kvm) ACCEL=kvm MODEL=host && shift ;;
        --verbose) VERBOSE=1 && shift ;;
        --help | -h) usage && exit ;;
        --) shift && break ;;
        *) fail "unknown option $1" ;;
    esac
done
if ((!${#DEVICES[@]})); then DEVICES=(rdma0 veth0 veth1); fi
if ((!$#)); then set -- bash "$HERE/checks.sh"; fi

# Where the system's programs are, also for users whose PATH lacks them.
PATH_HERE=$PATH
PATH=$PATH:/usr/sbin:/sbin
check_packages
mkdir -p "$CACHE"
# The name changes with what is in it.
KERNEL=$CACHE/vm-kernel-$(printf '%s ' "${MODULES[@]}" | cksum | cut -d' ' -f1)
[[ -d $KERNEL ]] || fetch_kernel "$KERNEL"

WORK=$(mktemp -d "${TMPDIR:-/tmp}/aiodatadist-vm.XXXXXX")
QEMU=
# shellcheck disable=SC2329  # the trap calls it
cleanup() {
    [[ -z $QEMU ]] || kill "$QEMU" 2>/dev/null || true
    rm -rf -- "$WORK"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

mkdir "$WORK/control"
make_initramfs "$KERNEL" "$WORK/initramfs"
cp "$HERE/guest.sh" "$WORK/control/"
printf '%s\n' "${DEVICES[@]}" >"$WORK/control/devices"
{
    PATH=$PATH_HERE
    export -p
    printf 'export IN_TEST_VM=1\ncd %q || exit 125\nexec' "$PWD"
    printf ' %q' "$@"
    echo
} >"$WORK/control/command.sh"
PATH=$PATH:/usr/sbin:/sbin

mkfifo "$WORK/out" "$WORK/err"
cat "$WORK/out" &
READERS=($!)
cat "$WORK/err" >&2 &
READERS+=($!)

# share TAG FOLDER OPTIONS: a folder of this machine that the guest can mount.
share() {
    MACHINE+=(-fsdev "local,id=$1,path=${2//,/,,},security_model=none,multidevs=remap$3"
        -device "virtio-9p-pci,fsdev=$1,mount_tag=$1")
}
# Emulated processors on busy cores are slow, and their clocks and watchdogs are not to complain about it.
MACHINE=(-nodefaults -no-user-config -nographic -no-reboot -nic none -M pc
    -accel "$ACCEL" -cpu "$MODEL" -m "$MEMORY" -smp "$CPUS"
    -kernel "$KERNEL/vmlinuz" -initrd "$WORK/initramfs"
    -append "console=ttyS0 panic=-1 ${VERBOSE:+no}quiet mitigations=off nokaslr audit=0 apparmor=0 tsc=unstable nowatchdog
        rcupdate.rcu_cpu_stall_suppress=1 random.trust_cpu=1"
    -serial "file:$WORK/console" -device virtio-serial-pci)
for stream in out err; do
    MACHINE+=(-chardev "file,id=$stream,path=$WORK/$stream" -device "virtserialport,chardev=$stream,name=$stream")
done
share host / ,readonly=on
share control "$WORK/control" ''

timeout --kill-after=5 "$LIMIT" qemu-system-x86_64 "${MACHINE[@]}" </dev/null >"$WORK/qemu" 2>&1 &
QEMU=$!
ended=0
wait "$QEMU" || ended=$?
QEMU=
# Where QEMU has not even begun, nobody has opened the other ends.
for stream in out err; do : 2>/dev/null <>"$WORK/$stream"; done
wait "${READERS[@]}"

if [[ -n $VERBOSE || ! -e $WORK/control/status ]]; then cat "$WORK/console" "$WORK/qemu" >&2; fi
grep -a -o -E 'VM FAILED: .*|Kernel panic.*|BUG: .*|Oops: .*' "$WORK/console" | sed 's/^/run.sh: guest: /' >&2 || true
if [[ -e $WORK/control/status ]]; then exit "$(<"$WORK/control/status")"; fi
if ((ended == 124)); then
    echo "run.sh: the time limit of $LIMIT s was reached" >&2
    exit 124
fi
fail "the machine ended without an exit code of the command (QEMU: $ended)"
