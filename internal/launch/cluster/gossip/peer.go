package gossip

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/hashicorp/memberlist"
)

// Peer is an agent of the job, as it describes itself.
type Peer struct {
	Name    string // unique, a restarted agent has another
	Control string // host:port at which it takes control connections
}

// metaVersion begins a member's metadata. The control address follows.
const metaVersion = 2

const maxName = 300 // bytes: a host and a digest

// encode returns the metadata of a peer, or why others would refuse it.
func (p Peer) encode() ([]byte, error) {
	return append([]byte{metaVersion}, p.Control...), p.check()
}

// decode reads the metadata of the member called name. It keeps no part of meta.
func decode(name string, meta []byte) (Peer, error) {
	if len(meta) == 0 || meta[0] != metaVersion {
		return Peer{}, errors.New("its metadata is of another version of cprun")
	}
	p := Peer{Name: name, Control: string(meta[1:])}
	return p, p.check()
}

// check returns what is wrong with a peer, this agent or another.
func (p Peer) check() error {
	if p.Name == "" || len(p.Name) > maxName || !printable(p.Name) {
		return fmt.Errorf("an agent's name is 1 to %d printable bytes, and not %.40q", maxName, p.Name)
	}
	host, port, err := net.SplitHostPort(p.Control)
	if err != nil || host == "" || !printable(host) || len(p.Control) >= memberlist.MetaMaxSize {
		return fmt.Errorf("the control address of %s is %.80q; it must be host:port", p.Name, p.Control)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("the control address of %s is %.80q; its port must be 1 to 65535", p.Name, p.Control)
	}
	return nil
}

// printable reports whether s can go into messages as it is.
func printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}
