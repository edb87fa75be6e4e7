package hf

import (
	"encoding/json"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/safetensors"
)

// besides lists parts of a larger model: those of images and sound, and layers for the prediction of further tokens. An
// export of a Family.Whole copies them.
var besides = map[string]bool{"visual": true, "mtp": true, "vision_tower": true, "vision_embedder": true,
	"embed_vision": true, "audio_tower": true, "embed_audio": true}

// partOf returns the first part of a tensor's name.
func partOf(name string) string {
	part, _, _ := strings.Cut(strings.TrimPrefix(name, basePrefix), ".")
	return part
}

// outerKeys lists keys of a larger model's config.json. As in transformers, they override text_config.
var outerKeys = []string{"bos_token_id", "eos_token_id", padKey, "dtype", "torch_dtype", "tie_word_embeddings",
	"quantization_config"}

// addWhole renames the tensors as the files of model.from do, and adds the parts in besides.
func (m Model) addWhole(list []filed) []filed {
	for i := range list {
		list[i].Name = m.base.stored(list[i].Name)
	}
	for _, name := range slices.Sorted(maps.Keys(m.base.beside)) {
		f := m.base.beside[name]
		info, _ := f.Info(name)
		list = append(list, filed{Tensor: Tensor{Name: name, Shape: info.Shape, Layer: -1}, from: f})
	}
	return list
}

// copied returns the entry of a tensor of model.from.
func (f filed) copied() safetensors.Entry {
	info, _ := f.from.Info(f.Name)
	return safetensors.Entry{Name: f.Name, DType: info.DType, Shape: info.Shape, Data: func(w io.Writer) error {
		data := make([]byte, min(info.Bytes(), pieceSize))
		for off := int64(0); off < info.Bytes(); off += int64(len(data)) {
			data = data[:min(int64(len(data)), info.Bytes()-off)]
			if err := f.from.ReadBytes(f.Name, data, off); err != nil {
				return err
			}
			if _, err := w.Write(data); err != nil {
				return err
			}
		}
		return nil
	}}
}

// writeWhole copies config.json of model.from with new keys of the language model.
func (m Model) writeWhole(dir *os.Root) error {
	keys, err := m.Config.keys(dir.Name(), m.DType)
	if err != nil {
		return err
	}
	d, err := files.OpenRepo(m.From)
	if err != nil {
		return err
	}
	defer d.Close()
	var all, text map[string]json.RawMessage // raw: Python tells 1.0 from 1
	if _, err := d.Decode("config.json", maxConfig, maxConfigValues, &all); err != nil {
		return err
	}
	if m.Config.Wrapper == "" {
		return writeJSON(dir, "config.json", over(all, keys))
	}
	if err := json.Unmarshal(all["text_config"], &text); err != nil {
		return err // ReadConfig has read it
	}
	delete(keys, "architectures")
	outside := map[string]any{"text_config": over(text, keys)}
	for _, key := range outerKeys {
		if _, ok := all[key]; ok {
			outside[key] = keys[key]
		}
	}
	return writeJSON(dir, "config.json", over(all, outside))
}

// over adds the keys of a file that others lack to these.
func over(file map[string]json.RawMessage, keys map[string]any) map[string]any {
	for key, raw := range file {
		if _, ok := keys[key]; !ok {
			keys[key] = raw
		}
	}
	return keys
}
