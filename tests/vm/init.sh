#!/bin/busybox sh
# The first process of the guest, from the initramfs: loads the modules, mounts the host's root file system with a
# layer of memory on top, and goes there. run.sh says what it leaves in the folder `control`.
export PATH=/bin
fail() {
    echo "VM FAILED: $*"
    poweroff -f
}
mount9p() { mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3" "$1" "$2" || fail "cannot mount $1"; }

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module" || fail "insmod $module"; done </modules/order

mount9p host /host ro,cache=loose
mount -t tmpfs -o mode=755,size=75% memory /memory
mkdir /memory/upper /memory/work
mount -t overlay -o lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work root /root || fail "cannot mount root"
mount -t tmpfs -o mode=755 run /root/run
mkdir /root/run/lock /root/run/vm
mount9p control /root/run/vm rw,cache=none
for folder in proc sys dev; do
    mkdir -p "/root/$folder"
    mount --move "/$folder" "/root/$folder"
done
mkdir /root/dev/pts /root/dev/shm
mount -t devpts -o mode=620,ptmxmode=666 devpts /root/dev/pts
mount -t tmpfs -o mode=1777 shm /root/dev/shm
ln -s /proc/self/fd /root/dev/fd
for number in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${number%:*}" "/root/dev/${number#*:}"; done
exec chroot /root /bin/bash /run/vm/guest.sh
