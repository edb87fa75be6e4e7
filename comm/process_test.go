package comm_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/worldtest"
)

// kinds lists worlds of processes, with all pairs connected or with few.
var kinds = worldtest.ProcessKinds{
	"unix":     {},
	"alone":    {Connect: connectAs(func(m comm.Mesh) comm.Mesh { m.Alone = true; return m })},
	"few-unix": {Connect: connectAs(func(m comm.Mesh) comm.Mesh { return m.Few(1) })},
	"mixed":    {Connect: connectMixed},
	"few-mixed": {Connect: func(ctx context.Context, m comm.Mesh, opts comm.Options) (*comm.Group, error) {
		return connectMixed(ctx, m.Few(1), opts)
	}},
}

// connectAs connects ranks of one node by a changed mesh.
func connectAs(change func(comm.Mesh) comm.Mesh) func(context.Context, comm.Mesh, comm.Options) (*comm.Group, error) {
	return func(ctx context.Context, m comm.Mesh, opts comm.Options) (*comm.Group, error) {
		return comm.Connect(ctx, change(m), nil, opts)
	}
}

// isFew reports whether ranks of a kind are connected with few others.
func isFew(kind string) bool { return strings.HasPrefix(kind, "few") }

// ranksOf returns the number of processes of a kind. With few neighbours it is large enough that some pairs are not
// connected.
func ranksOf(kind string) int {
	if isFew(kind) {
		return 6
	}
	return 4
}

func TestMain(m *testing.M) {
	kinds.Main()
	goleak.VerifyTestMain(m)
}

// connectMixed joins ranks of two nodes of this machine: of two following ranks each, with a
// directory of its own. A listener's address goes into a file.
func connectMixed(ctx context.Context, m comm.Mesh, opts comm.Options) (*comm.Group, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	file := func(rank int) string { return filepath.Join(m.Dir, fmt.Sprint("addr-", rank)) }
	if err := os.WriteFile(file(m.Rank)+".new", []byte(ln.Addr().String()), 0o600); err != nil {
		return nil, err
	}
	if err := os.Rename(file(m.Rank)+".new", file(m.Rank)); err != nil {
		return nil, err
	}
	node := func(rank int) int { return rank / 2 }
	m.Addrs = make([]string, m.Size)
	for r := range m.Rank {
		for node(r) != node(m.Rank) && m.Addrs[r] == "" {
			if b, err := os.ReadFile(file(r)); err == nil {
				m.Addrs[r] = string(b)
			} else if ctx.Err() != nil {
				return nil, err
			} else {
				time.Sleep(time.Millisecond)
			}
		}
	}
	m.Listener, m.Dir = ln, filepath.Join(m.Dir, fmt.Sprint("node-", node(m.Rank)))
	if err := os.Mkdir(m.Dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	return comm.Connect(ctx, m, nil, opts)
}

// TestKill kills one of several processes. All others must blame it by name, whatever they wait for, and never a rank
// that only suffered. In the short form each kind makes two calls, and each call is one of two kinds.
func TestKill(t *testing.T) {
	calls := []string{"all-reduce", "idle", "late", "chain", "barrier"}
	for i, kind := range slices.Sorted(maps.Keys(kinds)) {
		for j, call := range calls {
			if testing.Short() && j != i && j != (i+1)%len(calls) {
				continue
			}
			t.Run(kind+" "+call, func(t *testing.T) {
				kinds.End(t, kind, call, ranksOf(kind), worldtest.Kill, comm.ErrPeerLost.Error())
			})
		}
	}
}

// TestStop stops a process without ending it, so that only the deadline detects it. Informing the stopped rank must not
// delay the others. With few neighbours they must find each other although it lies between them.
func TestStop(t *testing.T) {
	for kind := range kinds {
		for _, call := range []string{"stop", "detour"} {
			if testing.Short() && (call == "detour") != isFew(kind) {
				continue
			}
			t.Run(kind+" "+call, func(t *testing.T) {
				t.Parallel()
				kinds.End(t, kind, call, ranksOf(kind), worldtest.Stop, ", the deadline")
			})
		}
	}
}

// TestAbortExit ends a process right after its abort. The abort's cause wins over the end of the connection.
func TestAbortExit(t *testing.T) {
	for kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			kinds.End(t, kind, "abort", ranksOf(kind), worldtest.Abort, "the loss is not a number")
		})
	}
}
