#!/usr/bin/env bash
# The first process of the guest from init.sh on: makes the RDMA devices, runs the command, stops the machine.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
control=/run/vm

stop() {
    [[ -z ${1:-} ]] || echo "VM FAILED: $1" >/dev/console
    busybox poweroff -f
    # The kernel takes a moment, and must not see its first process end.
    while :; do busybox sleep 1; done
}

# Two ends of a wire within one machine. Packets for an address of this machine would never leave it: so those from one
# end to the other are not looked up among its own addresses before they come in again.
make_wire() {
    local end
    ip link add veth0 type veth peer name veth1
    ip rule add pref 20 lookup local
    ip rule add pref 10 iif lo from 10.77.100.1 to 10.77.100.2 lookup main
    ip rule add pref 10 iif lo from 10.77.100.2 to 10.77.100.1 lookup main
    ip rule del pref 0
    echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
    for end in veth0 veth1; do
        echo 1 >"/proc/sys/net/ipv4/conf/$end/accept_local"
        echo 0 >"/proc/sys/net/ipv4/conf/$end/rp_filter"
        # Each end answers for its own address only.
        echo 1 >"/proc/sys/net/ipv4/conf/$end/arp_ignore"
        echo 2 >"/proc/sys/net/ipv4/conf/$end/arp_announce"
    done
}

hostname vm
ip link set lo up
number=0
while read -r netdev; do
    case $netdev in
        veth[01])
            [[ -e /sys/class/net/veth0 ]] || make_wire
            address=10.77.100.$((${netdev#veth} + 1))
            ;;
        *)
            ip link add "$netdev" type dummy || stop "no netdev $netdev"
            address=10.77.$number.1
            ;;
    esac
    # As large as RDMA's own units can be made use of: 4,096 bytes and headers.
    ip link set "$netdev" mtu 9000 up
    ip addr add "$address/24" dev "$netdev"
    rdma link add "rxe$number" type rxe netdev "$netdev" || stop "no RDMA device on $netdev"
    number=$((number + 1))
done <$control/devices

ulimit -l unlimited -c 0 -n 65536
for port in /sys/class/virtio-ports/*; do
    read -r name <"$port/name"
    mkfifo "/run/$name"
    cat "/run/$name" >"/dev/${port##*/}" &
    writers+=($!)
done
cut -d' ' -f1 /proc/uptime >$control/started
setsid bash $control/command.sh </dev/null >/run/out 2>/run/err
echo $? >$control/status
# What the command left behind may hold the pipes.
{ sleep 5; kill "${writers[@]}"; } 2>/dev/null &
wait "${writers[@]}"
stop
