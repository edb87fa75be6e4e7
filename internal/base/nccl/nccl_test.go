//go:build cuda

package nccl

import (
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

func TestVersion(t *testing.T) {
	v := must.Have(Version())
	t.Logf("NCCL %s", VersionText(v))
	a := must.Have(NewID())
	b := must.Have(NewID())
	if a == b || a == (ID{}) {
		t.Errorf("ids %x and %x: want two different ones", a, b)
	}
}

func TestTexts(t *testing.T) {
	for v, want := range map[int]string{22809: "2.28.9", 23203: "2.32.3", Oldest: "2.27.0"} {
		if got := VersionText(v); got != want {
			t.Errorf("VersionText(%d) = %q, want %q", v, got, want)
		}
	}
	e := &Error{Call: "ncclAllReduce", Text: "invalid usage"}
	if got, want := e.Error(), "ncclAllReduce: invalid usage"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	e.Detail = "no such rank"
	if got, want := e.Error(), "ncclAllReduce: invalid usage (no such rank)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
