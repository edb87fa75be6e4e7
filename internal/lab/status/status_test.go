package status

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/launch/waits"
)

func logs(t *testing.T) *os.Root {
	t.Helper()
	root := must.Have(os.OpenRoot(t.TempDir()))
	t.Cleanup(func() { root.Close() })
	return root
}

func node(run string, rank, start int, written int64) *Node {
	return &Node{
		Version: Version, RunID: run, Host: "h", PID: 1, Rank: rank, Ranks: 1, WorldSize: 2, Start: start,
		Every: 1, State: Running,
		Written: time.Unix(written, 0).
			UTC(),
		Rows: []Row{{WaitState: waits.WaitState{Rank: rank, Step: 3}, Resident: 4096}},
	}
}

func TestWhatIsWrittenIsRead(t *testing.T) {
	root := logs(t)
	if nodes, err := Read(root); len(nodes) != 0 || err != nil {
		t.Errorf("of an empty directory: %v, %v", nodes, err)
	}
	must.Do(t, os.WriteFile(filepath.Join(root.Name(), "status-0000.json.new"), []byte("left by a crash"),
		0o600))
	for range 2 {
		must.Do(t, Write(root, node("a", 0, 0, 10)))
	}
	nodes, err := Read(root)
	if err != nil || len(nodes) != 1 || !reflect.DeepEqual(nodes[0], *node("a", 0, 0, 10)) {
		t.Errorf("%+v, %v", nodes, err)
	}
	if names, _ := filepath.Glob(filepath.Join(root.Name(), "*")); len(names) != 1 {
		t.Errorf("it leaves %v", names)
	}
}

// TestReadTakesTheRunThatWroteLast checks that files of an earlier run and torn files are ignored. A node outside the
// last restart stays, without ranks.
func TestReadTakesTheRunThatWroteLast(t *testing.T) {
	root := logs(t)
	for _, n := range []*Node{node("old", 0, 5, 10), node("old", 3, 0, 99), node("new", 0, 1, 100),
		node("new", 1, 0, 60), node("new", 2, 1, 98)} {
		if n.RunID == "old" && n.Rank == 0 {
			n.Rank = 4
		}
		must.Do(t, Write(root, n))
	}
	for name, text := range map[string]string{"status-0007.json": `{"version":1,"run_`,
		"status-0008.json": `{"version":9}`, "status-0009.json": ""} {
		must.Do(t, os.WriteFile(filepath.Join(root.Name(), name), []byte(text), 0o600))
	}
	nodes, err := Read(root)
	if err != nil || len(nodes) != 3 {
		t.Fatalf("%+v, %v", nodes, err)
	}
	for i, n := range nodes {
		if n.Rank != i || n.RunID != "new" || (n.Ranks == 0) != (i == 1) || (len(n.Rows) == 0) != (i == 1) {
			t.Errorf("node %d is %+v", i, n)
		}
	}
}

func TestAFileThatCannotBeReadIsTold(t *testing.T) {
	root := logs(t)
	must.Do(t, os.Mkdir(filepath.Join(root.Name(), "status-0000.json"), 0o700))
	if nodes, err := Read(root); err == nil {
		t.Errorf("no error, and %v", nodes)
	}
}

// FuzzDecode checks that any file is refused, or bounded and cleaned.
func FuzzDecode(f *testing.F) {
	f.Add(
		[]byte(
			`{"version":1,"host":"\u001b[31mred","rows":[{"rank":-1,"state":"a\nb","resident_bytes":-5}],` +
				`"every_seconds":-1}`,
		),
	)
	f.Add([]byte(`{"version":1,"why":"` + strings.Repeat("x", 5000) + `","world_size":-9}`))
	f.Add([]byte("null"))
	f.Fuzz(func(t *testing.T, text []byte) {
		n, err := Decode(text)
		if err != nil {
			return
		}
		for _, s := range []string{n.Host, n.RunID, n.Why, n.State} {
			if strings.ContainsAny(s, "\x1b\n\t\r\x07") || len(s) > maxWhy {
				t.Errorf("%q is left of %q", s, text)
			}
		}
		if n.Rank < 0 || n.WorldSize < 0 || !(n.Every > 0) || len(n.Rows) > maxRows {
			t.Errorf("%+v", n)
		}
		for _, r := range n.Rows {
			if r.Rank < 0 || r.Resident < 0 || strings.ContainsAny(r.State, "\x1b\n") {
				t.Errorf("%+v", r)
			}
		}
		if _, err := json.Marshal(n); err != nil {
			t.Error(err)
		}
	})
}

// BenchmarkWrite measures the launcher's write of 8 ranks that each wait for another, once a second.
func BenchmarkWrite(b *testing.B) {
	root, err := os.OpenRoot(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	defer root.Close()
	n := node("a", 0, 0, 10)
	wait := waits.Wait{
		Op:    "exchange",
		Label: "step 15/backward/layer 0/hop 3 owner 3",
		Open:  []waits.Open{{Peer: 2, Bytes: 65536}, {Peer: 3, Bytes: 65536}},
	}
	n.Rows = nil
	for rank := range 8 {
		n.Rows = append(n.Rows,
			Row{WaitState: waits.WaitState{Rank: rank, Step: 3, Waits: []waits.Wait{wait}}, Resident: 4096})
	}
	for b.Loop() {
		if err := Write(root, n); err != nil {
			b.Fatal(err)
		}
	}
}
