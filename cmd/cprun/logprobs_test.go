package main

import (
	"compress/gzip"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// A llama computes in float64 with the weights of a Hugging Face directory, for the config of small.
type llama map[string][]float64

func readLlama(t *testing.T, dir string) llama {
	t.Helper()
	file, err := safetensors.Open(filepath.Join(dir, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	m := llama{}
	read := func(name string, n int) {
		w := make([]float32, n)
		if err := file.ReadFloat32(name, w, 0); err != nil {
			t.Fatal(err)
		}
		for _, x := range w {
			m[name] = append(m[name], float64(x))
		}
	}
	read("model.embed_tokens.weight", 256*32)
	read("model.norm.weight", 32)
	read("lm_head.weight", 256*32)
	for l := range 2 {
		for name, n := range map[string]int{"input_layernorm": 32, "post_attention_layernorm": 32,
			"self_attn.q_proj": 32 * 32, "self_attn.k_proj": 16 * 32, "self_attn.v_proj": 16 * 32,
			"self_attn.o_proj": 32 * 32, "mlp.gate_proj": 64 * 32, "mlp.up_proj": 64 * 32, "mlp.down_proj": 32 * 64} {
			read(fmt.Sprintf("model.layers.%d.%s.weight", l, name), n)
		}
	}
	return m
}

func times(w, x []float64) []float64 {
	y := make([]float64, len(w)/len(x))
	for i := range y {
		for j := range x {
			y[i] += w[i*len(x)+j] * x[j]
		}
	}
	return y
}

func normed(w, x []float64) []float64 {
	sum := 0.0
	for _, v := range x {
		sum += v * v
	}
	y := make([]float64, len(x))
	for i := range y {
		y[i] = x[i] / math.Sqrt(sum/float64(len(x))+1e-6) * w[i]
	}
	return y
}

// rotated applies rope to heads of 8 dimensions.
func rotated(x []float64, position int) []float64 {
	y := make([]float64, len(x))
	for h := 0; h < len(x); h += 8 {
		for i := range 4 {
			sin, cos := math.Sincos(float64(position) / math.Pow(10000, float64(i)/4))
			a, b := x[h+i], x[h+i+4]
			y[h+i], y[h+i+4] = a*cos-b*sin, b*cos+a*sin
		}
	}
	return y
}

// attended returns the attention of 4 heads of q over the keys, which have 2.
func attended(q []float64, keys, values [][]float64) []float64 {
	out := make([]float64, 32)
	for h := range 4 {
		sum, at := 0.0, h/2*8
		for j := range keys {
			score := 0.0
			for i := range 8 {
				score += q[h*8+i] * keys[j][at+i]
			}
			p := math.Exp(score / math.Sqrt(8))
			sum += p
			for i := range 8 {
				out[h*8+i] += p * values[j][at+i]
			}
		}
		for i := range 8 {
			out[h*8+i] /= sum
		}
	}
	return out
}

func add(x, y []float64) {
	for i := range x {
		x[i] += y[i]
	}
}

// logProbs returns the log softmax of each next token.
func (m llama) logProbs(ids []int) (out []float64) {
	keys, values := make([][][]float64, 2), make([][][]float64, 2)
	for n, id := range ids[:max(len(ids)-1, 0)] {
		x := append([]float64(nil), m["model.embed_tokens.weight"][id*32:id*32+32]...)
		for l := range 2 {
			w := func(name string) []float64 { return m[fmt.Sprintf("model.layers.%d.%s.weight", l, name)] }
			y := normed(w("input_layernorm"), x)
			keys[l] = append(keys[l], rotated(times(w("self_attn.k_proj"), y), n))
			values[l] = append(values[l], times(w("self_attn.v_proj"), y))
			q := rotated(times(w("self_attn.q_proj"), y), n)
			add(x, times(w("self_attn.o_proj"), attended(q, keys[l], values[l])))
			y = normed(w("post_attention_layernorm"), x)
			gate, up := times(w("mlp.gate_proj"), y), times(w("mlp.up_proj"), y)
			for i, g := range gate {
				gate[i] = g / (1 + math.Exp(-g)) * up[i]
			}
			add(x, times(w("mlp.down_proj"), gate))
		}
		logits, sum := times(m["lm_head.weight"], normed(m["model.norm.weight"], x)), 0.0
		for _, v := range logits {
			sum += math.Exp(v)
		}
		out = append(out, logits[ids[n+1]]-math.Log(sum))
	}
	return out
}

// Log-probabilities are those of a float64 model, on any number of ranks, however records are packed.
func TestLogProbs(t *testing.T) {
	t.Parallel()
	hf := filepath.Join(t.TempDir(), "hf")
	dir, _ := trains(t, "--set", "optimizer.lr=3e-2", small(t, 6))
	must(t, "export", dir, "--to", hf, "--dtype", "fp32")
	m, work, path := readLlama(t, hf), t.TempDir(), ""
	long := make([]int, 3000)
	for i := range long {
		long[i] = i * i % 251
	}
	all := [][]int{{}, {70, 111, 117, 114, 32, 115, 99, 111, 114, 101}, {5}, {97, 98}, {1, 2, 3, 4, 5, 6, 7}, {},
		{9, 8, 7, 6}}
	masked := map[int]bool{1: true, 2: true, 5: true} // of the fifth record
	records := func(more ...[]int) string {
		var b strings.Builder
		for k, ids := range append(all, more...) {
			fmt.Fprintf(&b, `{"input_ids": %s`, strings.Join(strings.Fields(fmt.Sprint(ids)), ", "))
			if k == 4 {
				b.WriteString(`, "labels": [1, -100, -100, 4, 5, -100, 7]`)
			}
			b.WriteString("}\n\n")
		}
		return b.String()
	}
	path = write(t, work, "a.jsonl", records())
	for _, args := range [][]string{{dir, "--nproc", "1"}, {dir, "--nproc", "2"}, {hf, "--nproc", "3"},
		{dir, "--nproc", "2", "--set", "data.seq_len=11"},
		{dir, "--nproc", "2", "--set", "parallel.layout=zigzag", "--set", "parallel.algorithm=ulysses"}} {
		stdout, _ := must(t, append([]string{"eval", "--logprobs", path}, args...)...)
		lines := strings.Split(strings.TrimSpace(stdout), "\n")
		if len(lines) != len(all) {
			t.Fatalf("%q: %d lines, want %d:\n%s", args, len(lines), len(all), stdout)
		}
		for k, line := range lines {
			var got struct {
				IDs      []int
				LogProbs []*float64
				Sum      float64
				Targets  int
			}
			if decode(t, line, &got); !reflect.DeepEqual(got.IDs, all[k]) || got.LogProbs == nil ||
				len(got.LogProbs) != len(all[k]) || len(all[k]) > 0 && got.LogProbs[0] != nil {
				t.Fatalf("%q: %s", args, line)
			}
			sum, targets := 0.0, 0
			for i, want := range m.logProbs(all[k]) {
				p := got.LogProbs[i+1]
				if none := k == 4 && masked[i+1]; none != (p == nil) {
					t.Errorf("%q: token %d is a target: %t in %s", args, i+1, p != nil, line)
				} else if !none && !(math.Abs(*p-want) <= 1e-5) {
					t.Errorf("%q: token %d has %v, want %v", args, i+1, *p, want)
				} else if !none {
					sum, targets = sum+want, targets+1
				}
			}
			if got.Targets != targets || !(math.Abs(got.Sum-sum) <= 1e-4) {
				t.Errorf("%q: %d targets with %v, want %d with %v", args, got.Targets, got.Sum, targets, sum)
			}
		}
	}
	path = write(t, work, "a.jsonl", records(long)) // its line is sent in pieces
	var packed strings.Builder
	z := gzip.NewWriter(&packed)
	if _, err := io.WriteString(z, content(t, path)); err != nil || z.Close() != nil {
		t.Fatal(err)
	}
	write(t, work, "a.jsonl.gz", packed.String())
	stdout, _ := must(t, "eval", dir, "--logprobs", path+".gz", "--nproc", "2")
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	var got struct{ LogProbs []*float64 }
	if decode(t, lines[len(lines)-1], &got); len(got.LogProbs) != len(long) {
		t.Errorf("a long record has %d log-probabilities", len(got.LogProbs))
	}
	messages := write(t, work, "m.jsonl", `{"messages": [{"role": "user", "content": "a"}]}`)
	empty := write(t, work, "empty.jsonl", "\n")
	for _, c := range [][]string{
		{`conversations need the tokenizer of a model`, "--logprobs", messages},
		{"remove --data", "--logprobs", path, "--data", path},
		{"want records, such as a .jsonl", "--logprobs", "a.bin"},
		{"cprun: --logprobs: no file none.jsonl.gz", "--logprobs", "none.jsonl.gz"},
		{"cprun: --data: no file none.jsonl", "--data", "none.jsonl"},
		{"the longest record needs 3000", "--logprobs", path, "--set", "data.seq_len=100"},
		{"no records", "--logprobs", empty},
		{"eval sets it", "--logprobs", path, "--set", "data.validation.every=0"},
		{"eval sets it", "--data", path, "--set", "data.path=" + messages},
		{"needs parallel.data: 1", "--logprobs", path, "--nproc", "2", "--set", "parallel.data=2", "--set",
			"train.global_batch_size=2"},
		{"needs data.pack_documents: true", "--logprobs", path, "--set", "data.pack_documents=false"},
	} {
		invalid(t, append([]string{"eval", dir}, c[1:]...), c[0])
	}
}

// Samples are as long as the records of the template that --set names.
func TestLogProbsOfAnotherTemplate(t *testing.T) {
	t.Parallel()
	const chat = "../../internal/text/data/testdata/chat"
	dir, _ := trains(t, "--set", "model.vocab_size=422", "--set", "data.tokenizer="+chat, "--set", "data.seq_len=64",
		small(t, 2))
	records := write(t, t.TempDir(), "m.jsonl",
		`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}`)
	template := write(t, t.TempDir(), "long.jinja",
		"{% for m in messages %}{{ m['role'] + m['content'] * 300 + '\n' }}{% endfor %}")
	stdout, _ := must(t, "eval", dir, "--logprobs", records, "--set", "data.chat_template="+template)
	var got struct{ IDs []int }
	if decode(t, stdout, &got); len(got.IDs) < 300 {
		t.Errorf("%d ids", len(got.IDs))
	}
}
