//go:build !portable

package key

import (
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// ofThisUser returns an error if the process at the other end belongs to another user.
func ofThisUser(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) {
		peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	switch {
	case failed != nil:
		return failed
	case int(peer.Uid) != os.Geteuid():
		return fmt.Errorf("process %d is of user %d, and this is user %d", peer.Pid, peer.Uid, os.Geteuid())
	}
	return nil
}
