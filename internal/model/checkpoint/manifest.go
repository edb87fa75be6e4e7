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
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/base/terminal"
)

const (
	manifestName   = "manifest.json"
	manifestFormat = "cprun-checkpoint"
	// Version is the newest version of the manifest that this package reads, and the one that it writes. Since version
	// 2 a manifest holds its own checksum.
	Version = 2
	// maxCount bounds the tokens of a run, so that a JSON number is exact.
	maxCount = 1 << 53
)

// ErrVersion reports a checkpoint of a newer cprun.
var ErrVersion = errors.New("newer checkpoint format")

// Meta describes the state of a run except its tensors: everything that a resume needs.
type Meta struct {
	Step    int64 `json:"step"`    // optimizer steps done
	Samples int64 `json:"samples"` // samples consumed: the position in the data
	Tokens  int64 `json:"tokens"`  // tokens trained on
	World   World `json:"world"`
	// Config is the resolved config.yaml of the run.
	Config string `json:"config"`
	// CPRunVersion is the version of cprun that wrote it.
	CPRunVersion string `json:"cprun_version"`
	// Seeds are the run's seeds by name. Random numbers are functions of seed, step and position, so the generators
	// have no other state.
	Seeds map[string]int64 `json:"seeds"`
	// Extra is further state by owner, such as a data loader's.
	Extra map[string]json.RawMessage `json:"extra,omitempty"`
}

// World describes the ranks that saved: Size of them, Context ranks a sequence, in Data groups, with the config's
// Algorithm and Layout. Loading ignores it.
type World struct {
	Size      int    `json:"size"`
	Context   int    `json:"context"`
	Data      int    `json:"data"`
	Algorithm string `json:"algorithm"`
	Layout    string `json:"layout"`
}

// Manifest is manifest.json, the index of a checkpoint. See docs/formats.md.
type Manifest struct {
	Format  string `json:"format"`  // "cprun-checkpoint"
	Version int    `json:"version"` // of the format: 1
	Meta
	// Generation is the number of the start that wrote it, at least 1; 0 in older versions.
	Generation   int64       `json:"generation,omitempty"`
	ConfigSHA256 string      `json:"config_sha256"` // of Meta.Config, lower-case hex
	Fields       []string    `json:"fields"`        // names: param, exp_avg, exp_avg_sq
	Params       []ParamInfo `json:"params"`
	Files        []FileInfo  `json:"files"` // one for each shard
	// SHA256 is the checksum of the manifest's text with zeros in place of these digits.
	SHA256 string `json:"sha256,omitempty"`

	pieces map[string][]piece // by tensor name, set by ParseManifest
}

// ParamInfo is the global shape of a parameter.
type ParamInfo struct {
	Name  string `json:"name"`
	Shape []int  `json:"shape"`
	DType string `json:"dtype"` // in safetensors' notation
}

// FileInfo is one shard.
type FileInfo struct {
	Name    string  `json:"name"`
	Bytes   int64   `json:"bytes"`
	SHA256  string  `json:"sha256"` // of the whole file, lower-case hex
	Entries []Entry `json:"entries"`
}

// Entry maps a tensor of a shard, a vector, to the elements Offset to Offset + Length of a flattened parameter's field.
type Entry struct {
	Tensor string `json:"tensor"`
	Offset int64  `json:"offset"`
	Length int64  `json:"length"`
}

// newManifest returns the manifest of a save without files.
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

// noSum replaces the checksum while it is computed.
var noSum = strings.Repeat("0", 2*sha256.Size)

// encode returns the text of manifest.json in the current version.
func (m *Manifest) encode() ([]byte, error) {
	m.Version, m.SHA256 = Version, noSum
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	if err := e.Encode(m); err != nil {
		return nil, err
	}
	text := b.Bytes()
	m.SHA256 = sum(string(text))
	copy(text[bytes.LastIndex(text, []byte(noSum)):], m.SHA256)
	return text, nil
}

// checkSum compares the text of a manifest with the checksum in it. Only this detects a flipped bit in a value such as
// the tokens or a seed.
func (m *Manifest) checkSum(data []byte) error {
	at := bytes.LastIndex(data, []byte(m.SHA256))
	if len(m.SHA256) != len(noSum) || at < 0 {
		return fmt.Errorf("version %d without its own checksum", m.Version)
	}
	text := bytes.Clone(data)
	copy(text[at:], noSum)
	if got := sum(string(text)); got != m.SHA256 {
		return fmt.Errorf("it has changed since it was written: its checksum is %.12s…, and it says %.12s…", got,
			m.SHA256)
	}
	return nil
}

// ParseManifest reads and checks the text of manifest.json: every element of every field must be in exactly one shard.
// It ignores unknown keys within a version, and refuses a newer version with ErrVersion.
func ParseManifest(data []byte) (*Manifest, error) {
	if err := files.Modest(data, maxValues); err != nil {
		return nil, fmt.Errorf("%s: %w", manifestName, err)
	}
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
		return nil, fmt.Errorf("%s: format %.64q is not %q", manifestName, head.Format, manifestFormat)
	case head.Version > Version:
		return nil, fmt.Errorf(
			"%s: %w: version %d by cprun %.64q, this one reads up to %d; use that cprun or a later one",
			manifestName, ErrVersion, head.Version, head.CPRunVersion, Version)
	case head.Version < 1:
		return nil, fmt.Errorf("%s: version %d does not exist", manifestName, head.Version)
	}
	m := &Manifest{}
	if err := json.Unmarshal(data, m); err != nil {
		return nil, fmt.Errorf("%s: %w", manifestName, err)
	}
	if m.Version > 1 {
		if err := m.checkSum(data); err != nil {
			return nil, fmt.Errorf("%s: %w", manifestName, err)
		}
	}
	var err error
	if m.pieces, err = m.index(); err != nil {
		return nil, fmt.Errorf("%s: %w", manifestName, err)
	}
	return m, nil
}

const elementSize = 4

// A piece is a part of a flattened field of a parameter.
type piece struct {
	file           int // index in Files
	offset, length int64
}

// index checks m and returns the pieces of each tensor in order.
func (m *Manifest) index() (map[string][]piece, error) {
	// A step consumes at least one sample, and a sample has at least one token.
	if m.Step < 0 || m.Samples < m.Step || m.Tokens < m.Samples || m.Tokens > maxCount {
		return nil, fmt.Errorf("step %d, samples %d and tokens %d: want step <= samples <= tokens", m.Step, m.Samples,
			m.Tokens)
	}
	if m.Generation < 0 {
		return nil, fmt.Errorf("generation %d: want 1 or more", m.Generation)
	}
	if m.ConfigSHA256 != sum(m.Config) {
		return nil, errors.New("config_sha256 does not match config")
	}
	sizes, err := m.sizes()
	if err != nil {
		return nil, err
	}
	pieces := map[string][]piece{}
	names := map[string]bool{manifestName: true}
	for i, f := range m.Files {
		if names[f.Name] || f.Name == "" || !filepath.IsLocal(f.Name) || filepath.Base(f.Name) != f.Name ||
			f.Name == "." {
			return nil, fmt.Errorf("file name %.255q is listed twice or is not a plain name", f.Name)
		}
		names[f.Name] = true
		if raw, err := hex.DecodeString(f.SHA256); err != nil || len(raw) != sha256.Size || f.Bytes < 0 {
			return nil, fmt.Errorf("file %s: %d bytes with checksum %.70q are not a size and a SHA-256",
				terminal.Name(f.Name), f.Bytes, f.SHA256)
		}
		seen, held := map[string]bool{}, int64(0)
		for _, e := range f.Entries {
			size, known := sizes[e.Tensor]
			if !known || seen[e.Tensor] {
				return nil, fmt.Errorf("file %s: tensor %.255q is listed twice or is of no parameter",
					terminal.Name(f.Name), e.Tensor)
			}
			seen[e.Tensor] = true
			if e.Offset < 0 || e.Length <= 0 || e.Length > size || e.Offset > size-e.Length {
				return nil, fmt.Errorf("file %s: tensor %.255q: %d elements from %d on are not in its %d",
					terminal.Name(f.Name),
					e.Tensor, e.Length, e.Offset, size)
			}
			if held += e.Length; held > f.Bytes/elementSize { // each at most 2^61, so the sum does not overflow
				return nil, fmt.Errorf("file %s: its tensors have more elements than its %d bytes hold",
					terminal.Name(f.Name), f.Bytes)
			}
			pieces[e.Tensor] = append(pieces[e.Tensor], piece{i, e.Offset, e.Length})
		}
		if rest := f.Bytes - held*elementSize; rest > safetensors.MaxHeader+8 {
			return nil, fmt.Errorf("file %s: %d of its bytes belong to no tensor", terminal.Name(f.Name), rest)
		}
	}
	return pieces, cover(sizes, pieces)
}

// sizes returns the number of elements of every tensor, over all shards.
func (m *Manifest) sizes() (map[string]int64, error) {
	sizes := map[string]int64{}
	fields := slices.Clone(m.Fields)
	slices.Sort(fields)
	if len(fields) == 0 || slices.Contains(fields, "") || len(slices.Compact(fields)) != len(m.Fields) {
		return nil, fmt.Errorf("fields %.64q: want one or more different names", m.Fields[:min(len(m.Fields), 16)])
	}
	for _, p := range m.Params {
		n, err := elements(p.Shape)
		if err == nil && p.DType != "F32" {
			err = fmt.Errorf("element type %.64q is not F32", p.DType)
		}
		if err != nil {
			return nil, fmt.Errorf("parameter %.255q: %w", p.Name, err)
		}
		for _, f := range m.Fields {
			name := tensorName(p.Name, f)
			if _, twice := sizes[name]; twice || p.Name == "" {
				return nil, fmt.Errorf("tensor name %.255q of parameter %.255q is listed twice or empty", name, p.Name)
			}
			sizes[name] = n
		}
	}
	return sizes, nil
}

// cover sorts the pieces of every tensor and checks for gaps and overlaps.
func cover(sizes map[string]int64, pieces map[string][]piece) error {
	for name, size := range sizes {
		list := pieces[name]
		slices.SortFunc(list, func(a, b piece) int { return cmp.Compare(a.offset, b.offset) })
		at := int64(0)
		for _, p := range list {
			if p.offset != at {
				return fmt.Errorf("tensor %.255q: the next part in the shards begins at element %d, not at %d", name,
					p.offset, at)
			}
			at += p.length
		}
		if at != size {
			return fmt.Errorf("tensor %.255q: the shards hold %d of %d elements", name, at, size)
		}
	}
	return nil
}
