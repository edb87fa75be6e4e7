package wire

import (
	"net"
	"time"

	"github.com/cprun/cprun/comm/internal/pace"
)

// awaitTaken blocks until the peer's system has acknowledged all bytes of a TCP connection whose write side has
// been shut down, until the connection is lost, or until the given time. After that the peer can read the
// bytes, even if the connection ends. Without the wait, unread or late data from the peer would make this
// system reset the connection when the process exits, and drop undelivered bytes. A Unix socket
// delivers at once, so awaitTaken returns at once.
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
