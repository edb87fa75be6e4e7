package gossip

import (
	"bytes"
	"strings"
	"testing"

	"github.com/hashicorp/memberlist"
)

// FuzzPeer decodes arbitrary metadata.
func FuzzPeer(f *testing.F) {
	for _, p := range []Peer{
		{Name: "n0", Control: "10.0.0.3:4000"},
		{Name: "n1", Control: "[fd00::1]:65535"},
		{Name: strings.Repeat("h", 255) + "-0123456789abcdef", Control: "[fd00::1]:65535"},
	} {
		meta, err := p.encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(p.Name, meta)
		f.Add(p.Name, meta[:len(meta)-1])
		f.Add(p.Name, append(meta, 0))
	}
	f.Add("", []byte{})
	f.Add("n", bytes.Repeat([]byte{1}, memberlist.MetaMaxSize+1))
	f.Fuzz(func(t *testing.T, name string, meta []byte) {
		p, err := decode(name, meta)
		if err != nil {
			return
		}
		again, err := p.encode()
		if err != nil {
			t.Fatalf("%+v was read and cannot be written: %v", p, err)
		}
		if !bytes.Equal(again, meta) {
			t.Fatalf("%x is written as %x", meta, again)
		}
	})
}

func TestPeerReadsWhatItWrites(t *testing.T) {
	want := Peer{Name: "n0", Control: "10.0.0.3:4000"}
	meta, err := want.encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := decode("n0", meta)
	if err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
	clear(meta)
	if got != want {
		t.Error("the peer changes with the packet that it came in")
	}
}
