package hf

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/safetensors"
)

const (
	singleFile = "model.safetensors"
	indexFile  = "model.safetensors.index.json"
	lmHead     = "lm_head.weight"
)

// Tensor is a parameter that a model has.
type Tensor struct {
	Name  string
	Shape []int
}

// Weights are the open safetensors files of a model directory. Its methods may be called
// from several goroutines.
type Weights struct {
	path  string
	files []*os.File
	where map[string]*safetensors.File // by tensor
	names []string
}

// OpenWeights opens model.safetensors, or the shards that model.safetensors.index.json names,
// and reads their headers. The caller closes it.
func OpenWeights(path string) (*Weights, error) {
	d, err := openDir(path)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	w := &Weights{path: path, where: map[string]*safetensors.File{}}
	switch {
	case d.exists(singleFile):
		err = w.openFile(d)
	case d.exists(indexFile):
		err = w.openShards(d)
	default:
		err = fmt.Errorf("model directory %s: neither %s nor %s in it", path, singleFile, indexFile)
		if d.exists("pytorch_model.bin") || d.exists("pytorch_model.bin.index.json") {
			err = fmt.Errorf("%w; pytorch_model.bin is a pickle, which can run code and is not read: load it in transformers and save_pretrained with safetensors", err)
		}
	}
	if err != nil {
		w.Close()
		return nil, err
	}
	for name := range w.where {
		w.names = append(w.names, name)
	}
	slices.Sort(w.names)
	return w, nil
}

// openShard opens one file of the directory.
func (w *Weights) openShard(d *dir, name string) (*safetensors.File, error) {
	f, err := d.open(name)
	if err != nil {
		return nil, err
	}
	w.files = append(w.files, f)
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("model directory %s: %w", w.path, err)
	}
	return safetensors.New(filepath.Join(w.path, name), f, st.Size())
}

func (w *Weights) openFile(d *dir) error {
	s, err := w.openShard(d, singleFile)
	if err != nil {
		return err
	}
	for _, name := range s.Names() {
		w.where[name] = s
	}
	return nil
}

// openShards opens every shard of the index and checks that index and shards agree.
func (w *Weights) openShards(d *dir) error {
	raw, err := d.readJSON(indexFile)
	if err != nil {
		return err
	}
	path := filepath.Join(w.path, indexFile)
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(raw, &index); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if len(index.WeightMap) == 0 {
		return fmt.Errorf("%s: weight_map: missing or empty", path)
	}
	byFile := map[string][]string{}
	for tensor, file := range index.WeightMap {
		byFile[file] = append(byFile[file], tensor)
	}
	var faults []error
	for _, file := range sortedKeys(byFile) {
		s, err := w.openShard(d, file)
		if err != nil {
			faults = append(faults, fmt.Errorf("%s: weight_map: %w", path, err))
			continue
		}
		slices.Sort(byFile[file])
		for _, tensor := range byFile[file] {
			if _, ok := s.Info(tensor); !ok {
				faults = append(faults, fmt.Errorf("%s: weight_map: tensor %q is not in %s", path, tensor, file))
			}
			w.where[tensor] = s
		}
		for _, tensor := range s.Names() {
			if index.WeightMap[tensor] != file {
				faults = append(faults, fmt.Errorf("%s: weight_map: does not place tensor %q in %s, which has it", path, tensor, file))
			}
		}
	}
	return errors.Join(faults...)
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// Close closes the files.
func (w *Weights) Close() error {
	var errs []error
	for _, f := range w.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// Check compares the files with the tensors of a model: every one that is missing, has
// another shape or a type that is not a float is in the error, and every one that the model
// does not have. Two kinds may be there in vain: rotary_emb.inv_freq, which old files carry,
// and the lm_head.weight of a model that is tied to its embeddings.
func (w *Weights) Check(want []Tensor) error {
	var faults []error
	known := map[string]bool{lmHead: true}
	for _, t := range want {
		known[t.Name] = true
		if err := w.check(t); err != nil {
			faults = append(faults, err)
		}
	}
	for _, name := range w.names {
		if !known[name] && !strings.HasSuffix(name, "rotary_emb.inv_freq") {
			faults = append(faults, fmt.Errorf("model directory %s: tensor %q: the model of config.json has none of that name", w.path, name))
		}
	}
	return errors.Join(faults...)
}

func (w *Weights) check(t Tensor) error {
	s, ok := w.where[t.Name]
	if !ok {
		err := fmt.Errorf("model directory %s: tensor %q: missing, shape %v is needed", w.path, t.Name, t.Shape)
		if t.Name == lmHead {
			err = fmt.Errorf("%w; without it the embeddings must be tied: tie_word_embeddings true", err)
		}
		return err
	}
	i, _ := s.Info(t.Name)
	if !slices.Equal(i.Shape, t.Shape) {
		return fmt.Errorf("model directory %s: tensor %q: shape %v, config.json asks for %v", w.path, t.Name, i.Shape, t.Shape)
	}
	switch i.DType {
	case safetensors.F64, safetensors.F32, safetensors.F16, safetensors.BF16:
		return nil
	}
	return fmt.Errorf("model directory %s: tensor %q: type %s; F64, F32, F16 and BF16 are read", w.path, t.Name, i.DType)
}

// Read fills dst with the elements of a tensor, row-major, from element off on: all of it,
// or a rank's part. t.Shape is the shape that the file must have.
func (w *Weights) Read(t Tensor, dst []float32, off int64) error {
	if err := w.check(t); err != nil {
		return err
	}
	return w.where[t.Name].ReadFloat32(t.Name, dst, off)
}
