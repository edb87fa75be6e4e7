package wire

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/comm/internal/pace"
)

// awaitTaken blocks until the peer's system has taken all that was written to a TCP connection
// whose write side has been shut down, until the connection is lost, or until the given time. The
// peer can read what its system has taken, whatever becomes of the connection. The rest may be
// lost when this process exits: where data of the peer are unread, or come in later, this system
// resets the connection and drops what it has not delivered. It returns at once for a Unix socket,
// which has no such rest.
func awaitTaken(conn net.Conn, until time.Time) {
	c, ok := conn.(*net.TCPConn)
	if !ok {
		return
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	for look := (pace.Backoff{}); onTheWay(raw) && time.Now().Before(until); {
		look.Wait()
	}
}

// onTheWay reports whether the peer's system has yet to acknowledge the end of what was written,
// and with it all before. The connection is then in one of three states (RFC 9293, section 3.3.2);
// one that is closed or lost is in none of them.
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
