package checkpoint

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/base/safetensors"
)

// A save that reads the state in pieces, none above PieceSize, makes the checkpoint of one from a copy, bit for bit,
// including NaN and signed zeros. A failed read fails the save.
func TestSaveInPieces(t *testing.T) {
	params := []Param{{Name: "w", Shape: []int{2*PieceSize + 5}}, {Name: "b", Shape: []int{3}, Offset: 2*PieceSize + 7}}
	own, want := Range{0, 2*PieceSize + 10}, make([]float32, 2*PieceSize+10)
	for i := range want {
		want[i] = float32(i)
	}
	for i, bits := range []uint32{0x80000000, 1, 0x7f800000, 0xff800000, 0x7fc00001, 0xffc12345, 0x7f7fffff} {
		want[i] = math.Float32frombits(bits)
	}
	for _, c := range []struct {
		copy  bool
		fault error
	}{{}, {copy: true}, {fault: fs.ErrPermission}} {
		s := must.Have(NewSaver(world(1)[0], Options{Dir: rooted(t.TempDir()), RunID: "run"}))
		snap := Snapshot{Params: params, Ranges: []Range{own}, Fields: []Field{{Name: FieldParam}},
			Read: func(_ context.Context, field int, lo int64, dst []float32) error {
				if copy(dst, want[lo:]); field != 0 || len(dst) > PieceSize {
					t.Errorf("%d elements of field %d at once", len(dst), field)
				}
				return c.fault
			}}
		if c.copy {
			snap.Fields[0].Data, snap.Read = want, nil
		}
		err := s.Save(t.Context(), snap)
		if e := s.Close(); e != nil || !errors.Is(err, c.fault) {
			t.Errorf("reads fail with %v: %v, %v", c.fault, err, e)
		}
		if c.fault != nil {
			continue
		}
		got := make([]float32, len(want))
		must.Do(t, loadFrom(t, filepath.Join(s.o.Dir.Name(), dirName(0)), params, own, Field{FieldParam, got}))
		want[2*PieceSize+5], want[2*PieceSize+6] = 0, 0 // between the parameters
		same := func(a, b float32) bool { return math.Float32bits(a) == math.Float32bits(b) }
		if !slices.EqualFunc(got, want, same) {
			t.Error("the checkpoint has other elements")
		}
	}
}

// Of two starts that record themselves at the same time, the older one ends.
func TestClaimsRace(t *testing.T) {
	f, h := fenceIn(t)
	h.hook = func(call string) error {
		if call == "create" {
			h.hook = func(string) error { return nil }
			record(t, h, 7)
		}
		return nil
	}
	if err := f.claim(nil); !errors.Is(err, ErrSuperseded) {
		t.Errorf("generation 6 beside 7: %v, want ErrSuperseded", err)
	}
}

// A start removes incomplete directories of other starts. Those of its own ranks stay until it commits.
func TestCleanKeepsOwnDirectories(t *testing.T) {
	dir := t.TempDir()
	s := must.Have(NewSaver(world(1)[0], Options{Dir: rooted(dir), RunID: "run"}))
	defer s.Close()
	for own, want := range map[bool]int{false: 1, true: 0} {
		for _, run := range []string{"run", "other"} {
			must.Do(t, os.MkdirAll(filepath.Join(dir, dirName(3)+".tmp-"+run), 0o755))
		}
		must.Do(t, s.clean(own))
		mine, _ := filepath.Glob(filepath.Join(dir, "*.tmp-run"))
		others, _ := filepath.Glob(filepath.Join(dir, "*.tmp-other"))
		if len(mine) != want || len(others) != 0 {
			t.Errorf("own %t: %v and %v are left", own, mine, others)
		}
	}
}

// A shard whose header differs from the manifest is refused.
func TestShardHeaderIsCompared(t *testing.T) {
	for _, c := range []struct {
		name  string
		dtype safetensors.DType
		shape []int
		ok    bool
	}{
		{"w", safetensors.F32, []int{4}, true}, {"v", safetensors.F32, []int{4}, false},
		{"w", safetensors.F16, []int{4}, false}, {"w", safetensors.F32, []int{2, 2}, false},
		{"w", safetensors.F32, []int{4, 1}, false}, {"w", safetensors.F32, []int{5}, false},
	} {
		n := 1
		for _, d := range c.shape {
			n *= d
		}
		path := filepath.Join(t.TempDir(), "shard")
		must.Do(t, safetensors.WriteFile(path, nil, []safetensors.Entry{safetensors.Floats(c.name, c.dtype, c.shape,
			make([]float32, n))}))
		f := must.Have(os.Open(path))
		st, err := f.Stat()
		if err == nil {
			_, err = readHeader(f, FileInfo{Name: "shard", Bytes: st.Size(), Entries: []Entry{{Tensor: "w", Length: 4}}})
		}
		if f.Close(); (err == nil) != c.ok {
			t.Errorf("%s %s %v: %v", c.name, c.dtype, c.shape, err)
		}
	}
}
