package gossip

import (
	"crypto/ed25519"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/hashicorp/memberlist"
)

// Peer is an agent of the job, as it tells the others of itself.
type Peer struct {
	Name     string // unique, a restarted agent has another
	Host     string // for people
	Control  string // host:port at which it takes control connections
	Identity []byte // Ed25519 public key of those; none if empty
	NodeRank int    // the one it asks for; -1: any
}

// What a peer says of itself travels in a member's metadata:
//
//	version (1) ‖ node rank (4, big endian, two's complement) ‖ identity ‖ host ‖ control
//
// Each of the last three is its length (1 byte) and its bytes. The name is the member's own.
const metaVersion = 1

const (
	maxName     = 300 // a host and a digest
	maxNodeRank = 1 << 20
)

// encode returns the metadata of a peer, or why others would not take it.
func (p Peer) encode() ([]byte, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	meta := binary.BigEndian.AppendUint32([]byte{metaVersion}, uint32(int32(p.NodeRank)))
	for _, field := range [][]byte{p.Identity, []byte(p.Host), []byte(p.Control)} {
		if len(field) > math.MaxUint8 {
			return nil, fmt.Errorf("%.40q… has %d bytes; %d is the most", field, len(field), math.MaxUint8)
		}
		meta = append(append(meta, byte(len(field))), field...)
	}
	if len(meta) > memberlist.MetaMaxSize {
		return nil, fmt.Errorf("host and control address have %d bytes together; they have room for %d",
			len(p.Host)+len(p.Control), memberlist.MetaMaxSize-len(meta)+len(p.Host)+len(p.Control))
	}
	return meta, nil
}

// decode reads the metadata of the member called name. It keeps no part of meta.
func decode(name string, meta []byte) (Peer, error) {
	if len(meta) > memberlist.MetaMaxSize {
		return Peer{}, fmt.Errorf("%d bytes of metadata", len(meta))
	}
	if len(meta) < 5 || meta[0] != metaVersion {
		return Peer{}, errors.New("its metadata is of another version of cprun")
	}
	p := Peer{Name: name, NodeRank: int(int32(binary.BigEndian.Uint32(meta[1:])))}
	rest := meta[5:]
	var fields [3][]byte
	for i := range fields {
		if len(rest) == 0 || len(rest) <= int(rest[0]) {
			return Peer{}, errors.New("its metadata ends too soon")
		}
		end := 1 + int(rest[0])
		fields[i], rest = rest[1:end], rest[end:]
	}
	if len(rest) > 0 {
		return Peer{}, errors.New("something follows its metadata")
	}
	if len(fields[0]) > 0 {
		p.Identity = append([]byte(nil), fields[0]...)
	}
	p.Host, p.Control = string(fields[1]), string(fields[2])
	return p, p.check()
}

// check says what is wrong with a peer, be it one's own or one that others tell of.
func (p Peer) check() error {
	if p.Name == "" || len(p.Name) > maxName || !printable(p.Name) {
		return fmt.Errorf("an agent's name is 1 to %d printable bytes, and not %.40q", maxName, p.Name)
	}
	if !printable(p.Host) {
		return fmt.Errorf("the host of %s cannot be printed: %.40q", p.Name, p.Host)
	}
	if p.NodeRank < -1 || p.NodeRank > maxNodeRank {
		return fmt.Errorf("%s asks for node rank %d", p.Name, p.NodeRank)
	}
	if n := len(p.Identity); n != 0 && n != ed25519.PublicKeySize {
		return fmt.Errorf("the identity of %s has %d bytes", p.Name, n)
	}
	host, port, err := net.SplitHostPort(p.Control)
	if err != nil || host == "" || !printable(host) {
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
