package wire

import (
	"context"
	"net"
	"strings"
)

// DialTCP connects to a rank's listener on another node.
func DialTCP(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: handshakeBound} // a host that was not up yet is asked again
	d.SetMultipathTCP(false)
	return d.DialContext(ctx, "tcp", addr)
}

// ListenTCP listens at a free port of a host, which is one of this node's addresses or names, of IPv4 or
// IPv6, with brackets or without; "" is all of them.
func ListenTCP(ctx context.Context, host string) (net.Listener, error) {
	var c net.ListenConfig
	c.SetMultipathTCP(false) // what looks for silence counts the segments of one path
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	return c.Listen(ctx, "tcp", net.JoinHostPort(host, "0"))
}
