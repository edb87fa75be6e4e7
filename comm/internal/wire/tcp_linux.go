//go:build !portable

package wire

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// keepSending bounds the time that the system retransmits on a connection.
func keepSending(raw syscall.RawConn, d time.Duration) {
	set(raw, unix.TCP_USER_TIMEOUT, int(d/time.Millisecond))
}

func sendOften(raw syscall.RawConn) {
	set(raw, unix.TCP_RTO_MAX_MS, int(resendBound/time.Millisecond))
	set(raw, unix.TCP_THIN_LINEAR_TIMEOUTS, 1)
}

// set sets an option of TCP. On a system without it, bad networks take more time.
func set(raw syscall.RawConn, option, value int) {
	_ = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, option, value) })
}

// segments returns the number of segments that this system has received on a connection, if known.
func segments(raw syscall.RawConn) (n uint32, ok bool) {
	err := raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			n, ok = info.Segs_in, true
		}
	})
	return n, ok && err == nil
}

// onTheWay reports whether the peer's system has yet to acknowledge the end of the stream, and with it all
// bytes before. Until then the connection is in one of three states (RFC 9293, section 3.3.2). A closed or
// lost connection is in none of them.
func onTheWay(raw syscall.RawConn) (waits bool) {
	err := raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil {
			return
		}
		switch info.State {
		case unix.BPF_TCP_FIN_WAIT1, unix.BPF_TCP_CLOSING, unix.BPF_TCP_LAST_ACK:
			waits = true
		}
	})
	return err == nil && waits
}
