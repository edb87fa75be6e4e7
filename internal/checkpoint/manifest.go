package checkpoint

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
)

const (
	manifestName   = "manifest.json"
	manifestFormat = "cprun-checkpoint"
	// Version is the newest version of the manifest that this package reads, and the one
	// that it writes.
	Version = 1
	// maxCount is more tokens than any run trains on, and what a JSON number holds exactly.
	maxCount = 1 << 53
)

// ErrVersion is the cause when a checkpoint was written by a newer cprun.
var ErrVersion = errors.New("newer checkpoint format")

// Meta is what a run says of a checkpoint beside its tensors: all it needs to go on as if it
// had never stopped.
type Meta struct {
	Step    int64 `json:"step"`    // optimizer steps done
	Samples int64 `json:"samples"` // samples consumed: the position in the data
	Tokens  int64 `json:"tokens"`  // tokens trained on
	World   World `json:"world"`
	// Config is the resolved config.yaml of the run.
	Config string `json:"config"`
	// CPRunVersion is the program that wrote it.
	CPRunVersion string `json:"cprun_version"`
	// Seeds are the run's seeds by name. Random numbers are functions of seed, step and
	// position, so the seeds are the whole state of the generators.
	Seeds map[string]int64 `json:"seeds"`
	// Extra is further state by the name of its owner, such as a data loader's.
	Extra map[string]json.RawMessage `json:"extra,omitempty"`
}

// World is how the ranks that saved were arranged. Loading does not depend on it.
type World struct {
	Size      int    `json:"size"`
	Context   int    `json:"context"`
	Data      int    `json:"data"`
	Algorithm string `json:"algorithm"`
	Layout    string `json:"layout"`
}

// Manifest is manifest.json: what a checkpoint holds and where.
type Manifest struct {
	Format  string `json:"format"`
	Version int    `json:"version"`
	Meta
	ConfigSHA256 string      `json:"config_sha256"`
	Fields       []string    `json:"fields"`
	Params       []ParamInfo `json:"params"`
	Files        []FileInfo  `json:"files"`
}

// ParamInfo is the global shape of a parameter.
type ParamInfo struct {
	Name  string `json:"name"`
	Shape []int  `json:"shape"`
	DType string `json:"dtype"` // as safetensors spells it
}

// FileInfo is one shard.
type FileInfo struct {
	Name    string  `json:"name"`
	Bytes   int64   `json:"bytes"`
	SHA256  string  `json:"sha256"` // of the whole file, lower-case hex
	Entries []Entry `json:"entries"`
}

// Entry says that a tensor of a shard, a vector, is the elements Offset to Offset + Length of
// a flattened parameter's field.
type Entry struct {
	Tensor string `json:"tensor"`
	Offset int64  `json:"offset"`
	Length int64  `json:"length"`
}

// newManifest is the manifest of a save; the caller adds the files.
func newManifest(meta Meta, params []Param, fields []Field) *Manifest {
	m := &Manifest{Format: manifestFormat, Version: Version, Meta: meta, ConfigSHA256: sum(meta.Config)}
	for _, f := range fields {
		m.Fields = append(m.Fields, f.Name)
	}
	for _, p := range params {
		m.Params = append(m.Params, ParamInfo{Name: p.Name, Shape: append([]int{}, p.Shape...), DType: "F32"})
	}
	return m
}

func sum(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

// encode is the text of manifest.json.
func (m *Manifest) encode() ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	err := e.Encode(m)
	return b.Bytes(), err
}

// ParseManifest reads the text of manifest.json and checks it whole: after it, every element
// of every field stands in exactly one shard. Keys that it does not know are ignored within
// a version; a newer version is refused with ErrVersion.
func ParseManifest(data []byte) (*Manifest, error) {
	var head struct {
		Format       string `json:"format"`
		Version      int    `json:"version"`
		CPRunVersion string `json:"cprun_version"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return nil, fmt.Errorf("%s: %w", manifestName, err)
	}
	switch {
	case head.Format != manifestFormat:
		return nil, fmt.Errorf("%s: format %q is not %q", manifestName, head.Format, manifestFormat)
	case head.Version > Version:
		return nil, fmt.Errorf("%s: %w: version %d by cprun %q, this one reads up to %d; use that cprun or a later one",
			manifestName, ErrVersion, head.Version, head.CPRunVersion, Version)
	case head.Version < 1:
		return nil, fmt.Errorf("%s: version %d does not exist", manifestName, head.Version)
	}
	m := &Manifest{}
	if err := json.Unmarshal(data, m); err != nil {
		return nil, fmt.Errorf("%s: %w", manifestName, err)
	}
	if _, err := m.index(); err != nil {
		return nil, fmt.Errorf("%s: %w", manifestName, err)
	}
	return m, nil
}

// piece is a part of a flattened field of a parameter.
type piece struct {
	file           int // index in Files
	offset, length int64
}

// index checks m and gives, for each tensor name, the pieces of it in order.
func (m *Manifest) index() (map[string][]piece, error) {
	// A step consumes a sample or more, and a sample has a token or more.
	if m.Step < 0 || m.Samples < m.Step || m.Tokens < m.Samples || m.Tokens > maxCount {
		return nil, fmt.Errorf("step %d, samples %d and tokens %d: no run has these", m.Step, m.Samples, m.Tokens)
	}
	if m.ConfigSHA256 != sum(m.Config) {
		return nil, errors.New("config_sha256 is not that of config")
	}
	sizes, err := m.sizes()
	if err != nil {
		return nil, err
	}
	pieces := map[string][]piece{}
	names := map[string]bool{manifestName: true}
	for i, f := range m.Files {
		if names[f.Name] || f.Name == "" || !filepath.IsLocal(f.Name) || filepath.Base(f.Name) != f.Name || f.Name == "." {
			return nil, fmt.Errorf("file name %q stands twice or is not a plain name", f.Name)
		}
		names[f.Name] = true
		if raw, err := hex.DecodeString(f.SHA256); err != nil || len(raw) != sha256.Size || f.Bytes < 0 {
			return nil, fmt.Errorf("file %s: %d bytes with checksum %q", f.Name, f.Bytes, f.SHA256)
		}
		seen := map[string]bool{}
		for _, e := range f.Entries {
			size, known := sizes[e.Tensor]
			if !known || seen[e.Tensor] {
				return nil, fmt.Errorf("file %s: tensor %q stands twice or is of no parameter", f.Name, e.Tensor)
			}
			seen[e.Tensor] = true
			if e.Offset < 0 || e.Length <= 0 || e.Length > size || e.Offset > size-e.Length {
				return nil, fmt.Errorf("file %s: tensor %q: %d elements from %d on, of %d", f.Name, e.Tensor, e.Length, e.Offset, size)
			}
			pieces[e.Tensor] = append(pieces[e.Tensor], piece{i, e.Offset, e.Length})
		}
	}
	return pieces, cover(sizes, pieces)
}

// sizes is the elements of every tensor that the shards hold together.
func (m *Manifest) sizes() (map[string]int64, error) {
	sizes := map[string]int64{}
	fields := slices.Clone(m.Fields)
	slices.Sort(fields)
	if len(fields) == 0 || slices.Contains(fields, "") || len(slices.Compact(fields)) != len(m.Fields) {
		return nil, fmt.Errorf("fields %q are none, empty or twice the same", m.Fields)
	}
	for _, p := range m.Params {
		n, err := elements(p.Shape)
		if err == nil && p.DType != "F32" {
			err = fmt.Errorf("element type %q is not F32", p.DType)
		}
		if err != nil {
			return nil, fmt.Errorf("parameter %q: %w", p.Name, err)
		}
		for _, f := range m.Fields {
			name := tensorName(p.Name, f)
			if _, twice := sizes[name]; twice || p.Name == "" {
				return nil, fmt.Errorf("tensor name %q of parameter %q stands twice or is empty", name, p.Name)
			}
			sizes[name] = n
		}
	}
	return sizes, nil
}

// cover sorts the pieces of every tensor and checks that they fill it without gap or overlap.
func cover(sizes map[string]int64, pieces map[string][]piece) error {
	for name, size := range sizes {
		list := pieces[name]
		slices.SortFunc(list, func(a, b piece) int { return cmp.Compare(a.offset, b.offset) })
		at := int64(0)
		for _, p := range list {
			if p.offset != at {
				return fmt.Errorf("tensor %q: the shards' parts go on at element %d where %d is next", name, p.offset, at)
			}
			at += p.length
		}
		if at != size {
			return fmt.Errorf("tensor %q: the shards hold %d of %d elements", name, at, size)
		}
	}
	return nil
}
