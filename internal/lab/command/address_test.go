package command

import (
	"errors"
	"net"
	"strings"
	"testing"
)

func TestNamedAddress(t *testing.T) {
	loopback := ""
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		if i.Flags&net.FlagLoopback != 0 {
			loopback = i.Name
		}
	}
	for _, name := range []string{"127.0.0.1", "127.0.0.0/8", "::ffff:127.0.0.1", loopback} {
		if addr, err := localAddress(name); addr.String() != "127.0.0.1" || err != nil {
			t.Errorf("--interface %s: %v, %v", name, addr, err)
		}
	}
	for _, name := range []string{"eth99", "203.0.113.7", "203.0.113.0/24", "\x1b[2J", "/", "::1/200"} {
		addr, err := localAddress(name)
		var input *InputError
		if !errors.As(err, &input) || !strings.Contains(err.Error(), "127.0.0.1") ||
			strings.Contains(err.Error(), "\x1b") {
			t.Errorf("--interface %q: %v, %v; want an error that lists what there is", name, addr, err)
		}
	}
}

func TestAddressTowardsPeers(t *testing.T) {
	if addr, err := localAddress("", "127.0.0.1:29400"); addr.String() != "127.0.0.1" || err != nil {
		t.Errorf("towards this host: %v, %v", addr, err)
	}
	if addr, err := localAddress("", "no.such.host.invalid:1"); err == nil {
		t.Errorf("towards a host that is not there: %v", addr)
	}
}
