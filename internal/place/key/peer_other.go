//go:build !linux || portable

package key

import (
	"errors"
	"fmt"
	"net"
)

// ofThisUser fails: no portable call returns the user of the process at the other end.
func ofThisUser(*net.UnixConn) error {
	return fmt.Errorf("the user of the other process: %w", errors.ErrUnsupported)
}
