package verify

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/internal/text/data"
	"github.com/cprun/cprun/partition"
)

// sources writes files of several kinds and returns them by name.
func sources(t *testing.T) map[string][]string {
	t.Helper()
	dir, rng := t.TempDir(), rand.New(rand.NewPCG(1, 2))
	text := func(n int) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte('a' + rng.IntN(20))
		}
		return string(b)
	}
	var lines, masked, ids bytes.Buffer
	for i := range 40 {
		fmt.Fprintf(&lines, "{\"text\": \"%s\"}\n\n", text(1+rng.IntN(60)))
		n := 2 + rng.IntN(40)
		id, label, mask := make([]string, n), make([]string, n), make([]string, n)
		for j := range n {
			id[j], label[j] = fmt.Sprint(rng.IntN(99)), fmt.Sprint(rng.IntN(99))
			mask[j] = fmt.Sprint(rng.IntN(2))
			if rng.IntN(3) == 0 {
				label[j] = "-100"
			}
		}
		list := func(x []string) string { return "[" + strings.Join(x, ",") + "]" }
		fmt.Fprintf(&masked, "{\"input_ids\": %s, \"labels\": %s, \"completion_mask\": %s}\n", list(id), list(label), list(mask))
		padding := strings.Repeat(",1", n-1) + strings.Repeat(",0", i%3)
		fmt.Fprintf(&ids, "{\"input_ids\": %s, \"attention_mask\": [1%s]}\n", list(append(id, make([]string, 0)...)),
			padding[:2*(n-1)])
	}
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	z.Write(lines.Bytes())
	z.Close()
	llmc := make([]byte, 1024+2*700)
	le := binary.LittleEndian
	le.PutUint32(llmc, 20240520)
	le.PutUint32(llmc[4:], 1)
	le.PutUint32(llmc[8:], 700)
	for i := range 700 {
		le.PutUint16(llmc[1024+2*i:], uint16(rng.IntN(30)))
	}
	pair := func(name string, least int) string {
		p, err := data.NewPair(filepath.Join(dir, name), 256)
		for range 30 {
			doc := make([]int32, rng.IntN(50))
			for i := range doc {
				doc[i] = int32(least + rng.IntN(90))
			}
			if err == nil && len(doc) > 0 {
				err = p.Add(doc)
			}
		}
		if err == nil {
			err = p.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		return filepath.Join(dir, name+".bin")
	}
	return map[string][]string{
		"text":             {writeFile(t, "a.txt", text(500)), writeFile(t, "b.txt", text(300))},
		"an empty file":    {writeFile(t, "c.txt", ""), writeFile(t, "d.txt", text(90))},
		"lines":            {writeFile(t, "a.jsonl", lines.String())},
		"compressed lines": {writeFile(t, "z.jsonl.gz", zipped.String())},
		"labels and masks": {writeFile(t, "masked.jsonl", masked.String())},
		"ids":              {writeFile(t, "ids.jsonl", ids.String())},
		"llm.c":            {writeFile(t, "llm.bin", string(llmc))},
		"several": {writeFile(t, "more.jsonl", lines.String()), writeFile(t, "more.txt", text(200)),
			writeFile(t, "llm2.bin", string(llmc))},
		"Megatron's index": {pair("pair", 1)}, "Megatron's EOS": {pair("eos", 0)},
	}
}

// open returns a config of bytes, and the loader of its files by a plan.
func open(t *testing.T, paths []string, eos int, plan data.Plan) (*config.Config, *data.Loader) {
	t.Helper()
	cfg := ofBytes(plan.SeqLen, paths...)
	cfg.Data.PackDocuments, cfg.Data.EOSTokenID, cfg.Data.Overlong = plan.PackDocuments, eos, "drop"
	tok := data.NewTokenizer(data.Bytes, 256)
	ds := must.Have(data.Open(data.Source{Paths: paths, Tokenizer: tok, EOS: eos, Vocab: 256}))
	l, err := data.New(ds, plan)
	if err != nil {
		t.Fatalf("%s: %v", paths, err)
	}
	return cfg, l
}

// ofBytes returns a config of bytes.
func ofBytes(length int, paths ...string) *config.Config {
	cfg := &config.Config{}
	cfg.Model.VocabSize, cfg.Data.Tokenizer, cfg.Data.SeqLen = 256, data.Bytes, length
	for _, p := range paths {
		cfg.Data.Path = append(cfg.Data.Path, config.File{Path: p})
	}
	return cfg
}

// Every sample has the rows of the training loader.
func TestRecordsEqualTheLoader(t *testing.T) {
	t.Parallel()
	for name, paths := range sources(t) {
		if name == "labels and masks" {
			continue // never cut
		}
		for _, packed := range []bool{false, true} {
			for _, eos := range []int{-1, 0, 99} { // 99 is also inside texts
				if eos < 0 && packed && slices.Contains([]string{"llm.c", "several", "an empty file"}, name) {
					continue // refused: nothing ends a document
				}
				cfg, l := open(t, paths, eos, data.Plan{SeqLen: 37, PackDocuments: packed})
				equalLoader(t, fmt.Sprintf("%s, packed %t, eos %d", name, packed, eos), cfg, l)
			}
		}
	}
}

// Whole documents have the rows of the packing loader, also in a prefix of the samples.
func TestWholeRecordsEqualTheLoader(t *testing.T) {
	t.Parallel()
	all := sources(t)
	for _, name := range []string{"labels and masks", "lines", "ids", "several", "Megatron's index", "Megatron's EOS"} {
		for _, packed := range []bool{false, true} {
			cfg, l := open(t, all[name], 0, data.Plan{SeqLen: 37, PackDocuments: packed, Whole: true})
			var samples []int64
			var batch [][]Row
			for s := range l.Samples() {
				samples, batch = append(samples, s), append(batch, loaded(t, cfg, l, s))
			}
			for _, length := range []int{37, 20} {
				cfg.Data.SeqLen = length
				for i, rows := range batch {
					batch[i] = rows[:min(len(rows), length)]
				}
				got := must.Have(wholeRecords(cfg, 37, samples, batch))
				for s, rows := range got {
					if !slices.Equal(rows, batch[s]) {
						t.Fatalf("%s, packed %t, sample %d:\n%v\nthe loader has\n%v", name, packed, s, rows, batch[s])
					}
				}
			}
			twice := append(slices.Clone(batch[0]), batch[1]...) // a document is twice in the batch
			if got, err := wholeRecords(cfg, 37, samples[:2], [][]Row{twice, batch[1]}); err != nil || name != "several" &&
				len(got[0])+len(got[1]) >= len(twice)+len(batch[1]) {
				t.Errorf("%s: a repeated document has as many records: %v", name, err)
			}
		}
	}
}

type loader interface {
	Samples() int64
	Docs(int64) []int
	Load(int64, []partition.Span, []int32, []int32, []int) error
}

func equalLoader(t *testing.T, name string, cfg *config.Config, l loader) {
	t.Helper()
	var samples []int64
	for s := range l.Samples() {
		samples = append(samples, s)
	}
	got, err := Records(cfg, cfg.Data.SeqLen, samples)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	for _, s := range samples {
		if want := loaded(t, cfg, l, s); !slices.Equal(got[s], want) {
			t.Fatalf("%s, sample %d:\n%v\nthe loader has\n%v", name, s, got[s], want)
		}
	}
}

// loaded returns the rows of a sample by a loader.
func loaded(t *testing.T, cfg *config.Config, l loader, sample int64) (rows []Row) {
	t.Helper()
	docs, n := l.Docs(sample), 0
	for _, length := range docs {
		n += length
	}
	ids, targets, positions := make([]int32, n), make([]int32, n), make([]int, n)
	must.Do(t, l.Load(sample, []partition.Span{{Len: n, Stride: 1}}, ids, targets, positions))
	at := 0
	for d, length := range docs {
		for range length {
			rows = append(rows, Row{ids[at], targets[at], int32(positions[at]), int32(d)})
			at++
		}
	}
	return rows
}

// In a mixture, each source has its own samples.
func TestRecordsOfAMixture(t *testing.T) {
	all := sources(t)
	paths := []string{all["lines"][0], all["llm.c"][0], all["text"][0]}
	cfg := ofBytes(29, paths...)
	cfg.Data.PackDocuments = true
	var parts []*data.Loader
	for i := range paths {
		cfg.Data.Path[i].Weight = 1
		_, l := open(t, paths[i:i+1], 0, data.Plan{SeqLen: 29, PackDocuments: true})
		parts = append(parts, l)
	}
	m := must.Have(data.Mix(parts, []float64{1, 1, 1}, 1))
	equalLoader(t, "mixture", cfg, m)
}

// Reach equals reachability in the graph of all visible pairs of all layers.
func TestReach(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		cfg := &config.Config{Model: config.Model{Config: hf.Config{NumHiddenLayers: 1 + rng.IntN(4)}}}
		m := &cfg.Model
		if rng.IntN(3) > 0 {
			m.SlidingWindow = 1 + rng.IntN(6)
		}
		for range m.NumHiddenLayers * rng.IntN(2) {
			m.LayerTypes = append(m.LayerTypes, []string{"full_attention", "sliding_attention"}[rng.IntN(4)/3])
		}
		rows, doc := make([]Row, 1+rng.IntN(30)), int32(0)
		for i := range rows {
			if rng.IntN(8) == 0 {
				doc++
			}
			rows[i].Document = doc
		}
		at := rng.IntN(len(rows))
		reached := make([]bool, len(rows))
		reached[at] = true
		for layer := range m.NumHiddenLayers {
			next := slices.Clone(reached)
			for q := range rows {
				for k := 0; k <= q; k++ {
					near := m.Layer(layer).Mixer.Window < 0 || q-k <= m.Layer(layer).Mixer.Window
					next[q] = next[q] || reached[k] && near && rows[q].Document == rows[k].Document
				}
			}
			reached = next
		}
		lo, hi := Reach(cfg, rows, at)
		for i, want := range reached {
			if got := lo <= i && i < hi; got != want {
				t.Fatalf("%d layers, window %d %v, documents %v: from %d to %d: %t, want %t", m.NumHiddenLayers,
					m.SlidingWindow, m.LayerTypes, rows, at, i, got, want)
			}
		}
	}
}

// side returns a side with gradients of the parameters of a small model, with each after the first scaled, and with
// parameters of right steps. edit may change the parameters after them. batch has the rows of both steps.
func side(t *testing.T, cfg *config.Config, scale float32, batch [][]Row,
	edit func(name string, x float64) float64) *Side {
	t.Helper()
	var files [train.VerifiedSteps + 1][]safetensors.Entry
	add := func(steps int, kind, of string, values []float32) {
		for lo := 0; lo < len(values); lo += len(values)/2 + 1 { // in two parts
			hi := min(len(values), lo+len(values)/2+1)
			files[steps] = append(files[steps], safetensors.Floats(train.Part(kind, of, int64(lo)), safetensors.F32,
				[]int{hi - lo}, values[lo:hi]))
		}
	}
	params, norm := model.Layout(&cfg.Model.Config), 0.0
	gradient := func(i, j int) float32 {
		if i > 0 {
			return float32(1+(i+j)%7) * scale
		}
		return float32(1 + j%7)
	}
	for i, p := range params {
		for j := range p.Size() {
			norm += float64(gradient(i, j)) * float64(gradient(i, j))
		}
	}
	o := train.Hyper(cfg)
	for i, p := range params {
		grads, before, after := make([]float32, p.Size()), make([]float32, p.Size()), make([]float32, p.Size())
		for j := range grads {
			grads[j], before[j] = gradient(i, j), float32(1+j%3)
			w := adamW{x: float64(before[j])}
			for k := range train.VerifiedSteps {
				r := newRule(&o, k, math.Sqrt(norm), len(p.Shape) > 1)
				w.step(&r, float64(grads[j]))
			}
			if edit != nil {
				w.x = edit(p.Name, w.x)
			}
			after[j] = float32(w.x)
		}
		add(0, train.ParameterParts, p.Name, before)
		add(1, train.GradientParts, p.Name, grads)
		add(2, train.GradientParts, p.Name, grads)
		add(2, train.ParameterParts, p.Name, after)
	}
	v := train.Verified{Samples: []int64{0, 1, 2, 3}, All: 9}
	dir, n := t.TempDir(), len(batch)/train.VerifiedSteps
	for k := range train.VerifiedSteps {
		var rows []int32
		var trained []int64
		for i, list := range batch[k*n : (k+1)*n] {
			trained = append(trained, int64(k*n+i), int64(k*n+i))
			for j, r := range list {
				rows = append(rows, int32(k*n+i), int32(j), r.ID, r.Target, r.Position, r.Document)
			}
		}
		files[k+1] = append(files[k+1], entry(t, train.BatchTensor, safetensors.I32, train.VerifiedRow, rows),
			entry(t, train.TrainedTensor, safetensors.I64, 2, trained))
		targets := count(batch[k*n:(k+1)*n], isTarget)
		v.Steps = append(v.Steps, train.Stepped{Loss: 2, Sum: Float(2 * targets), GradNorm: Float(math.Sqrt(norm))})
	}
	for steps, entries := range files {
		must.Do(t, safetensors.WriteFile(train.VerifiedFile(dir, 0, steps), nil, entries))
	}
	s := must.Have(Open(dir, 1, v, len(batch[0])))
	t.Cleanup(func() { s.Close() })
	return s
}

func entry[T int32 | int64](t *testing.T, name string, dtype safetensors.DType, columns int, data []T) safetensors.Entry {
	raw := must.Have(binary.Append(nil, binary.LittleEndian, data))
	return safetensors.Entry{Name: name, DType: dtype, Shape: []int{len(data) / columns, columns},
		Data: func(w io.Writer) error { _, err := w.Write(raw); return err }}
}

// compared returns the differences of a run on eight tokens of text, after a change of the many side.
func compared(t *testing.T, change func(cfg *config.Config, batch [][]Row, many *Side) *Side) *Report {
	t.Helper()
	cfg := ofBytes(8, writeFile(t, "a.txt", "abcd\x00efgh\x00ijkl\x00mnopqrstuvwxyzABCDEF"))
	cfg.Model.Config = hf.Config{Architecture: "llama", VocabSize: 256, HiddenSize: 4, IntermediateSize: 8,
		NumHiddenLayers: 1, NumAttentionHeads: 2, NumKeyValueHeads: 1, HeadDim: 2}
	cfg.Data.PackDocuments = true
	cfg.Optimizer = config.Optimizer{Betas: [2]float64{0.9, 0.95}, WeightDecay: 0.1}
	cfg.Precision.Compute = "fp32"
	samples := []int64{0, 1, 2, 3}
	all := must.Have(Records(cfg, 8, samples))
	var batch, other [][]Row
	for _, s := range samples {
		batch, other = append(batch, all[s]), append(other, slices.Clone(all[s]))
	}
	one := side(t, cfg, 1, batch, nil)
	many := one
	if change != nil {
		many = change(cfg, other, side(t, cfg, 1, batch, nil))
	}
	r := &Report{Compute: "fp32", Ranks: 2}
	must.Do(t, Compare(r, cfg, 8, one, many))
	return r
}

// Each difference between the sides, the records and the masks is found, and named.
func TestCompare(t *testing.T) {
	t.Parallel()
	if r := compared(t, nil); !*r.OK || len(r.Differences) > 0 || r.Targets.Records != 13 || r.Documents.Records != 5 {
		t.Errorf("equal sides: %+v, %+v, %v", r.Targets, r.Documents, r.Differences)
	}
	rows := func(edit func(batch [][]Row)) func(*config.Config, [][]Row, *Side) *Side {
		return func(cfg *config.Config, batch [][]Row, _ *Side) *Side {
			edit(batch)
			return side(t, cfg, 1, batch, nil)
		}
	}
	scaled := func(scale float64, name string, factor float64) func(*config.Config, [][]Row, *Side) *Side {
		return func(cfg *config.Config, batch [][]Row, _ *Side) *Side {
			return side(t, cfg, float32(scale), batch, func(of string, x float64) float64 {
				if of == name {
					x *= factor
				}
				return x
			})
		}
	}
	result := func(edit func(s *Side)) func(*config.Config, [][]Row, *Side) *Side {
		return func(_ *config.Config, _ [][]Row, s *Side) *Side { edit(s); return s }
	}
	for _, c := range []struct {
		want   string
		change func(cfg *config.Config, batch [][]Row, many *Side) *Side
	}{
		{"targets: the records have 13, one rank 13, 2 ranks 14", rows(func(b [][]Row) { b[0][4].Target = 9 })},
		{"target of tokens on 2 ranks: 1 differ", rows(func(b [][]Row) { b[0][0].Target = 9 })},
		{"position of tokens on 2 ranks: 1 differ", rows(func(b [][]Row) { b[1][1].Position++ })},
		{"document of tokens on 2 ranks: 1 differ", rows(func(b [][]Row) { b[1][7].Document++ })},
		{"id of tokens on 2 ranks: 8 differ", rows(func(b [][]Row) { b[1] = b[0] })},
		{"documents: the records have 5, the batch 4; 2 are repeated", rows(func(b [][]Row) { b[1] = b[0] })},
		{"tokens: the records have 16, one rank 16, 2 ranks 15", rows(func(b [][]Row) { b[0] = append(b[0][:7:7], Row{ID: -1}) })},
		{"loss: 2 on one rank, 2.1 on 2", result(func(s *Side) { s.Steps[0].Loss = 2.1 })},
		{"loss: 2 on one rank, NaN on 2", result(func(s *Side) { s.Steps[0].Loss = Float(math.NaN()) })},
		{"gradient of model.layers.0.self_attn.q_proj.weight: relative error 0.5", scaled(0.5, "", 1)},
		{"gradient of model.norm.weight: relative error NaN", scaled(math.NaN(), "", 1)},
		{"loss: 3 on 2 ranks in step 2, and the sum over", result(func(s *Side) { s.Steps[1].Loss = 3 })},
		{"loss: 2 on one rank, 3 on 2, in step 2", result(func(s *Side) { s.Steps[1].Loss, s.Steps[1].Sum = 3, 48 })},
		{"gradient norm: 9 on 2 ranks in step 2", result(func(s *Side) { s.Steps[1].GradNorm = 9 })},
		{"samples of step 2 on 2 ranks: 0 in place of 2", result(func(s *Side) { s.trained = []int64{0, 1, 0, 1} })},
		{"samples: 0 is trained 2 times in two steps", result(func(s *Side) {
			s.trained, s.Samples = []int64{0, 1, 0, 1}, []int64{0, 1, 0, 1}
		})},
		{"id of tokens on 2 ranks: 8 differ from the records; token 0 of sample 2", rows(func(b [][]Row) { b[2] = b[0] })},
		{"rank 1 reads others than rank 0", result(func(s *Side) { s.weights = [][]byte{{1}, {2}} })},
		{"on 2 ranks: rank 0 reads 3 elements that differ", result(func(s *Side) { s.Steps[1].Stale = 3 })},
		{"parameter model.norm.weight after two steps on 2 ranks: AdamW of its gradients gives another",
			scaled(1, "model.norm.weight", 0.985)}, // decay
		{"parameter lm_head.weight after two steps: relative error 0.0001", scaled(1, "lm_head.weight", 1.0001)},
		{"leak: token 2 of document 0 changes 2 rows that its masks hide, such as 5",
			result(func(s *Side) { s.Probes = []train.Probed{{Position: 2, Changed: [][2]int{{2, 7}}}} })},
		{"leak: another token at position 2 changes no logits there",
			result(func(s *Side) { s.Probes = []train.Probed{{Position: 2, Changed: [][2]int{{3, 5}}}} })},
	} {
		r := compared(t, c.change)
		if all := strings.Join(r.Differences, "\n"); *r.OK || !strings.Contains(all, c.want) {
			t.Errorf("ok %t, without %q:\n%s", *r.OK, c.want, all)
		}
	}
}

// Gradients of mere rounding may differ in every bit.
func TestRoundingOfZeroGradientsIsNoDifference(t *testing.T) {
	for scale, right := range map[float32]bool{1e-7: true, 1e-5: false, float32(math.NaN()): false} {
		compared(t, func(cfg *config.Config, batch [][]Row, _ *Side) *Side {
			one, many := side(t, cfg, scale, batch, nil), side(t, cfg, -scale, batch, nil)
			r := &Report{Tolerance: 1e-5, Ranks: 2}
			if _, err := r.compareGradients(cfg, one, many); err != nil || (len(r.Differences) == 0) != right {
				t.Errorf("gradients of about %v: %v, %v", scale, err, r.Differences)
			}
			return one
		})
	}
}

// Linears in FP8 may change a gradient by three fifths and the loss by eight thousandths. Small gradients may change more.
func TestCompareLinears(t *testing.T) {
	for _, c := range []struct {
		one, scaled float32 // of all gradients but those of the embedding
		loss        Float
		want        string
	}{
		{1, 0.5, 2.014, ""}, {1e-4, -1e-4, 2, ""}, {1, -1, 2, "with linears in FP8: gradient of model.layers.0."},
		{0.01, 0.02, 2, "with linears in FP8: gradient of model.layers.0."},
		{1, 1, 2.02, "with linears in FP8: loss: 2.02 in place of 2"},
		{1, 1, Float(math.NaN()), "with linears in FP8: loss: NaN in place of 2"},
	} {
		compared(t, func(cfg *config.Config, batch [][]Row, _ *Side) *Side {
			one, scaled := side(t, cfg, c.one, batch, nil), side(t, cfg, c.scaled, batch, nil)
			scaled.Steps[0].Loss = c.loss
			r := &Report{}
			must.Do(t, CompareLinears(r, cfg, one, scaled))
			if all := strings.Join(r.Differences, "\n"); *r.OK != (c.want == "") || !strings.Contains(all, c.want) {
				t.Errorf("%+v: ok %t\n%s", c, *r.OK, all)
			}
			return one
		})
	}
}

// Logits that no token changes show no leak. If some do, the others must.
func TestLogitsThatNoTokenChanges(t *testing.T) {
	for _, changed := range [][][2]int{nil, {{2, 3}}} {
		r := compared(t, func(_ *config.Config, _ [][]Row, s *Side) *Side {
			s.Probes = []train.Probed{{Position: 2, Changed: changed}, {Position: 3}}
			return s
		})
		if *r.OK != (changed == nil) || (r.Leak == nil) != (changed == nil) || (r.Reasons["leak"] != "") != (changed == nil) {
			t.Errorf("%v: %+v", changed, r)
		}
	}
}

// A probe that could not run, and a batch without targets, are reasons and no differences.
func TestReasons(t *testing.T) {
	r := compared(t, func(_ *config.Config, _ [][]Row, s *Side) *Side { s.Noisy, s.Steps[0].Blank = true, true; return s })
	if !*r.OK || r.Leak != nil || r.Loss != nil || r.Gradients != nil || len(r.Reasons) != 5 || r.Step.Parameters != nil || len(r.Step.Samples) != 4 {
		t.Errorf("%+v", r)
	}
}
