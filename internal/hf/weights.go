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
	"github.com/cprun/cprun/internal/terminal"
)

const (
	singleFile = "model.safetensors"
	indexFile  = "model.safetensors.index.json"
)

// Tensor is the Name and Shape of a parameter that a model has.
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

	headers int64 // bytes of all headers
	tensors int   // in all files
}

// OpenWeights opens model.safetensors, or the shards that model.safetensors.index.json names,
// and reads their headers. The caller closes it.
func OpenWeights(path string) (*Weights, error) {
	d, err := openDir(path)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	w := &Weights{path: d.path, where: map[string]*safetensors.File{}}
	switch {
	case d.exists(singleFile):
		err = w.openFile(d)
	case d.exists(indexFile):
		err = w.openShards(d)
	default:
		err = fmt.Errorf("model directory %s: neither %s nor %s in it; model.from needs weights in safetensors", d.path, singleFile, indexFile)
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

// Bounds of a model in shards, whose files may be links to one: descriptors, and the memory of all
// headers together. The largest known models have 200 shards and 10 MB of headers.
const (
	maxShards  = 2048
	maxHeaders = 2 * safetensors.MaxHeader
)

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
	s, err := safetensors.New(filepath.Join(d.path, name), f, st.Size())
	if err != nil {
		return nil, err
	}
	w.headers += s.HeaderBytes()
	w.tensors += len(s.Names())
	if w.headers > maxHeaders || w.tensors > safetensors.MaxTensors {
		return nil, fmt.Errorf("model directory %s: the headers up to %s have %d bytes and %d tensors; at most %d and %d are read",
			w.path, terminal.Name(name), w.headers, w.tensors, maxHeaders, safetensors.MaxTensors)
	}
	return s, nil
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

// openShards opens every shard of the index and checks that index and shards agree. It gives up
// when as many faults were found as are told.
func (w *Weights) openShards(d *dir) error {
	index, err := d.readIndex()
	if err != nil {
		return err
	}
	path := filepath.Join(w.path, indexFile)
	byFile := map[string][]string{}
	for tensor, file := range index {
		byFile[file] = append(byFile[file], tensor)
	}
	if len(byFile) > maxShards {
		return fmt.Errorf("%s: weight_map: it names %d files; at most %d are opened", path, len(byFile), maxShards)
	}
	var faults terminal.Faults
	left := len(byFile)
	for _, file := range sortedKeys(byFile) {
		if faults.Full() {
			break
		}
		left--
		s, err := w.openShard(d, file)
		if err != nil {
			faults.Addf("%s: weight_map: %w", path, err)
			continue
		}
		slices.Sort(byFile[file])
		for _, tensor := range byFile[file] {
			if _, ok := s.Info(tensor); !ok {
				faults.Addf("%s: weight_map: tensor %.255q is not in %s; fetch the model again", path, tensor, terminal.Name(file))
			}
			w.where[tensor] = s
		}
		for _, tensor := range s.Names() {
			if index[tensor] != file {
				faults.Addf("%s: weight_map: tensor %.255q is in %s, but not listed for it; fetch the model again", path, tensor, terminal.Name(file))
			}
		}
	}
	if err := faults.Err(); err != nil && left > 0 {
		return fmt.Errorf("%w\n%s: %d more files that weight_map names were not looked at", err, path, left)
	}
	return faults.Err()
}

// readIndex returns the file of every tensor that the index names.
func (d *dir) readIndex() (map[string]string, error) {
	raw, err := d.readJSON(indexFile, maxIndex, maxIndexValues)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(d.path, indexFile)
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(raw, &index); err != nil {
		return nil, fmt.Errorf("%s: %s", path, terminal.Clip(err.Error(), 200))
	}
	if len(index.WeightMap) == 0 {
		return nil, fmt.Errorf("%s: weight_map: missing or empty", path)
	}
	return index.WeightMap, nil
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

// Check compares the files with the tensors of a model of a family: every one that is missing,
// has another shape or a type that is not a float is in the error, and every one that the model
// does not have. Two kinds may be there in vain: rotary_emb.inv_freq, which old files carry, and
// the head of a model that is tied to its embeddings.
func (w *Weights) Check(f *Family, want []Tensor) error {
	var faults terminal.Faults
	head := f.Tensors.Head
	known := map[string]bool{head: true}
	for _, t := range want {
		known[t.Name] = true
		err := w.check(t)
		if w.where[t.Name] == nil && t.Name == head {
			err = fmt.Errorf("%w; or set model.tie_word_embeddings to true, if the model has no output matrix of its own", err)
		}
		faults.Add(err)
	}
	for _, name := range w.names {
		if !known[name] && !strings.HasSuffix(name, "rotary_emb.inv_freq") {
			faults.Addf("model directory %s: tensor %.255q: config.json describes a model without it", w.path, name)
		}
	}
	return faults.Err()
}

func (w *Weights) check(t Tensor) error {
	s, ok := w.where[t.Name]
	if !ok {
		return fmt.Errorf("model directory %s: tensor %q: missing; config.json needs it with shape %v", w.path, t.Name, t.Shape)
	}
	i, _ := s.Info(t.Name)
	if !slices.Equal(i.Shape, t.Shape) {
		return fmt.Errorf("model directory %s: tensor %q: shape %v, but config.json needs %v", w.path, t.Name, i.Shape, t.Shape)
	}
	switch i.DType {
	case safetensors.F64, safetensors.F32, safetensors.F16, safetensors.BF16:
		return nil
	}
	return fmt.Errorf("model directory %s: tensor %q: type %.64s is not supported; convert it to F64, F32, F16 or BF16", w.path, t.Name, i.DType)
}

// Read fills dst with the elements of a tensor, row-major, from element off on: all of it,
// or a rank's part. t.Shape is the shape that the file must have.
func (w *Weights) Read(t Tensor, dst []float32, off int64) error {
	if err := w.check(t); err != nil {
		return err
	}
	return w.where[t.Name].ReadFloat32(t.Name, dst, off)
}
