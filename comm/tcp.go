package comm

import (
	"context"
	"fmt"
	"net"

	"github.com/cprun/cprun/internal/tensor"
)

// ConnectTCP joins processes of several nodes. Every rank brings its own listener and knows
// the addresses of all; how they got them is a rendezvous' business. All that is sent after
// the handshake is encrypted and authenticated.
func ConnectTCP(ctx context.Context, m Mesh, compute tensor.Stream, opts Options) (*Group, error) {
	if err := m.check(); err != nil {
		return nil, closing(m.Listener, fmt.Errorf("tcp mesh: %w", err))
	}
	if m.Rank > 0 && len(m.Addrs) != m.Size {
		return nil, closing(m.Listener, fmt.Errorf("tcp mesh: %d addresses for %d ranks", len(m.Addrs), m.Size))
	}
	if m.Listener == nil && m.Rank < m.Size-1 {
		return nil, fmt.Errorf("tcp mesh: rank %d of %d has no listener", m.Rank, m.Size)
	}
	return connect(ctx, m.identity(true), m.Listener, func(ctx context.Context, rank int) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", m.Addrs[rank])
	}, compute, opts)
}

// closing gives back what the mesh has taken over.
func closing(ln net.Listener, err error) error {
	if ln != nil {
		ln.Close()
	}
	return err
}
