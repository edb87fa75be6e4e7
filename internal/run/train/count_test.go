package train_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/internal/text/data"
)

// counted counts by definition, over documents of labels with -100 for none: the stream is cut into samples of seqLen
// tokens, and each token predicts the label of the next one, unless a document begins there and documents are packed.
func counted(seqLen int, packed bool, docs ...[]int) (tokens, targets, samples int64) {
	var labels []int
	begins := map[int]bool{}
	for _, d := range docs {
		begins[len(labels)] = true
		labels = append(labels, d...)
	}
	for at := 1; ; at++ {
		if (at-1)%seqLen == 0 && at+seqLen > len(labels) {
			return int64(len(labels)), targets, samples
		}
		if at%seqLen == 0 {
			samples++
		}
		if labels[at] != -100 && !(packed && begins[at]) {
			targets++
		}
	}
}

// countedWhole counts documents with masks: each is in one sample, or dropped if it is too long.
func countedWhole(seqLen int, packed bool, docs ...[]int) (c plan.Data) {
	room := 0
	for _, d := range docs { // not longer than the ones before, so that the best fit is the last sample
		c.Tokens += int64(len(d))
		if len(d) > seqLen {
			c.DroppedDocuments++
			continue
		}
		c.SamplePairs += float64(len(d)*(len(d)+1)) / 2
		if c.SampleTokens += int64(len(d)); !packed || room < len(d) {
			c.Samples, room = c.Samples+1, seqLen
		}
		room -= len(d)
		for _, label := range d[1:] {
			if label != -100 {
				c.Targets++
			}
		}
	}
	c.SamplePairs /= float64(max(c.Samples, 1))
	return c
}

// pairsOf counts the tokens that each token of the mean sample sees, if samples cut documents.
func pairsOf(seqLen, samples int, docs ...[]int) (pairs float64) {
	at := 0
	for _, d := range docs {
		seen := 0
		for range d {
			if at%seqLen == 0 {
				seen = 0
			}
			if seen++; at < samples*seqLen {
				pairs += float64(seen)
			}
			at++
		}
	}
	return pairs / float64(max(samples, 1))
}

// The numbers at the start of a run equal those of an independent count, for all kinds of files.
func TestDataIsCounted(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		return path
	}
	bytesOf := func(text string, end ...int) (ids []int) {
		for _, b := range []byte(text) {
			ids = append(ids, int(b))
		}
		return append(ids, end...)
	}
	bin := binary.LittleEndian.AppendUint32(nil, 20240520)
	for _, x := range []uint32{1, 9} {
		bin = binary.LittleEndian.AppendUint32(bin, x)
	}
	bin = append(bin, make([]byte, 1024-len(bin))...)
	tokens := []int{5, 6, 256, 7, 256, 8, 9, 10, 11}
	for _, id := range tokens {
		bin = binary.LittleEndian.AppendUint16(bin, uint16(id))
	}
	pair, err := data.NewPair(filepath.Join(dir, "pair"), 257)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range [][]int32{{1, 2, 3}, {4, 5}, {6, 7, 8, 9}} {
		if err := pair.Add(d); err != nil {
			t.Fatal(err)
		}
	}
	if err := pair.Close(); err != nil {
		t.Fatal(err)
	}
	text, empty := write("a.txt", "to be or not"), write("b.txt", "")
	lines := write("c.jsonl", `{"text":"ab"}`+"\n\n"+`{"text":""}`+"\n"+`{"text":"cdefg","label":3}`+"\n")
	even := write("f.jsonl", `{"text":"abc"}`+"\n"+`{"text":"def"}`+"\n"+`{"text":"gh"}`) // ends with a sample of 3
	masked := write("d.jsonl",
		`{"input_ids":[1,2,3,4,5,0],"attention_mask":[1,1,1,1,1,0],"completion_mask":[0,0,1,1,0,0]}`+"\n"+`{"input_ids":[6,7,8]}`+"\n"+`{"input_ids":[9],"labels":[-100]}`)
	plain, indexed := write("e.bin", string(bin)), filepath.Join(dir, "pair.bin")
	maskedDocs := [][]int{{-100, -100, 3, 4, -100}, {6, 7, 8}, {-100}}
	pairDocs := [][]int{{1, 2, 3}, {4, 5}, {6, 7, 8, 9}}
	for _, c := range []struct {
		set       string
		files     int64
		documents int64 // -1: unknown
		docs      [][]int
	}{
		{"path: " + text, 1, 1, [][]int{bytesOf("to be or not")}},
		{"path: " + dir + "/*.txt, eos_token_id: 256", 2, 1, [][]int{bytesOf("to be or not", 256)}},
		{"path: [" + text + ", " + empty + ", " + lines + "], eos_token_id: 256", 3, 3,
			[][]int{bytesOf("to be or not", 256), bytesOf("ab", 256), bytesOf("cdefg", 256)}},
		{"path: " + lines, 1, 2, [][]int{bytesOf("ab"), bytesOf("cdefg")}},
		{"path: " + lines + ", pack_documents: true", 1, 2, [][]int{bytesOf("ab"), bytesOf("cdefg")}},
		{"path: " + even + ", pack_documents: true", 1, 3, [][]int{bytesOf("abc"), bytesOf("def"), bytesOf("gh")}},
		{"path: " + text + ", pack_documents: true, eos_token_id: 32", 1, 4,
			[][]int{bytesOf("to "), bytesOf("be "), bytesOf("or "), bytesOf("not ")}}, // the last one is appended
		{"path: " + masked, 1, 3, maskedDocs},
		{"path: " + masked + ", pack_documents: true", 1, 3, maskedDocs},
		{"path: " + masked + ", pack_documents: false, overlong: drop", 1, 3, maskedDocs},
		{"path: " + lines + ", pack_documents: true, overlong: drop", 1, 2, [][]int{bytesOf("ab"), bytesOf("cdefg")}},
		{"path: " + plain, 1, -1, [][]int{tokens}},
		{"path: " + plain + ", eos_token_id: 256", 1, 3, [][]int{tokens}},
		{"path: " + plain + ", eos_token_id: 256, pack_documents: true", 1, 3,
			[][]int{tokens[:3], tokens[3:5], tokens[5:]}},
		{"path: " + indexed, 1, 3, pairDocs},
		{"path: " + indexed + ", pack_documents: true", 1, 3, pairDocs},
		{"path: [" + indexed + ", " + plain + "]", 2, -1, append(pairDocs[:3:3], tokens)},
	} {
		for _, seqLen := range []int{1, 3, 4, 5} {
			packed := strings.Contains(c.set, "pack_documents: true")
			cfg := load(t, tiny, 1, "data.eos_token_id=null",
				fmt.Sprintf("data={tokenizer: bytes, seq_len: %d, %s}", seqLen, c.set), "train.global_batch_size=2")
			want := countedWhole(seqLen, packed, c.docs...)
			if !strings.Contains(c.set, masked) && !strings.Contains(c.set, "drop") {
				want = plan.Data{}
				want.Tokens, want.Targets, want.Samples = counted(seqLen, packed, c.docs...)
				want.SampleTokens = want.Samples * int64(seqLen)
				if packed {
					want.SamplePairs = pairsOf(seqLen, int(want.Samples), c.docs...)
				}
			}
			want.Files = c.files
			got, err := train.Check(cfg)
			if err != nil && want.Targets == 0 {
				continue
			}
			if err != nil {
				t.Fatalf("%s: %v", c.set, err)
			}
			want.StepsPerEpoch, want.EpochSamples = (want.Samples+1)/2, want.Samples
			if want.First, err = train.FirstDocuments(cfg); err != nil {
				t.Fatal(err)
			}
			if c.documents >= 0 {
				want.Documents = &c.documents
			}
			if (got.Retention != nil) != (want.DroppedDocuments > 0) {
				t.Errorf("%s, seq_len %d: retention %v", c.set, seqLen, got.Retention)
			}
			got.Ignored, got.Retention, got.HeldBytes, got.EncodingBytes = nil, nil, 0, 0 // memory depends on files
			if !reflect.DeepEqual(*got, want) {
				t.Errorf("%s, seq_len %d: %+v, want %+v", c.set, seqLen, *got, want)
			}
		}
	}
	// Too many tokens for a check at the start are counted by the header; their documents are not counted.
	const many = 64<<20 + 1
	large := write("large.bin", string(binary.LittleEndian.AppendUint32(bin[:8:8], many))+string(bin[12:1024]))
	if err := os.Truncate(large, 1024+2*many); err != nil {
		t.Fatal(err)
	}
	found, err := train.Check(load(t, tiny, 1, "data={path: "+large+", seq_len: 1M}"))
	if err != nil || found.Documents != nil || found.Tokens != many || found.Samples != 64 || found.Targets != 64<<20 {
		t.Errorf("many tokens: %+v, %v", found, err)
	}
	// A mixture has all samples of its parts, each cut separately. Its epoch ends with the largest.
	cfg := load(t, tiny, 1,
		fmt.Sprintf("data={path: [{path: %s, weight: 3}, {path: %s}], seq_len: 3, tokenizer: bytes, eos_token_id: null}", text, masked))
	got, err := train.Check(cfg)
	if err != nil {
		t.Fatal(err)
	}
	aTokens, aTargets, aSamples := counted(3, false, bytesOf("to be or not"))
	b := countedWhole(3, false, maskedDocs...)
	share := 3.0 / (3 + 3/2.0) // the samples of b have 2 tokens on average
	if got.Files != 2 || *got.Documents != 4 || got.Tokens != aTokens+b.Tokens || got.Targets != aTargets+b.Targets ||
		got.Samples != aSamples+b.Samples || got.StepsPerEpoch != int64(math.Ceil(float64(aSamples)/share)) {
		t.Errorf("a mixture: %+v", *got)
	}
	for set, want := range map[string][2]int{
		"train.epochs=3":                         {18, 0},
		"train={epochs: 3, steps: null}":         {18, 0},
		"train.steps=7":                          {7, 0},
		"lr_schedule.warmup_ratio=0.3":           {4, 2},
		"train={epochs: 2, micro_batch_size: 1}": {12, 0},
	} {
		cfg := load(t, tiny, 1, "data={path: "+text+", seq_len: 2, tokenizer: bytes}", set)
		if _, err := train.Check(cfg); err != nil || cfg.Train.Steps != want[0] || cfg.Train.Epochs != 0 ||
			cfg.LRSchedule.WarmupSteps != want[1] || cfg.LRSchedule.WarmupRatio != 0 {
			t.Errorf("%s: %+v, %+v, %v, want %v steps and warmup", set, cfg.Train, cfg.LRSchedule, err, want)
		}
	}
	cfg = load(t, tiny, 1, "data={path: "+text+", seq_len: 2, tokenizer: bytes}", "train.epochs=357913942")
	if _, err := train.Check(cfg); err == nil || !strings.Contains(err.Error(), "train.epochs: ") {
		t.Errorf("too many epochs: %v", err)
	}
	if got, err := train.Check(
		load(t, tiny, 1, "data={path: "+lines+", seq_len: 3, tokenizer: bytes}")); err != nil ||
		!reflect.DeepEqual(got.Ignored, []string{"label"}) {
		t.Errorf("ignored keys: %+v, %v", got, err)
	}
}

// A directory that datasets has saved is one source, under any name.
func TestADirectoryOfDatasetsIsASource(t *testing.T) {
	saved := os.DirFS("../../text/data/testdata/rows/ids-dataset")
	for _, name := range []string{"set", "set[1]*"} {
		dir := filepath.Join(t.TempDir(), name)
		if err := os.CopyFS(dir, saved); err != nil {
			t.Fatal(err)
		}
		want, err := train.Check(load(t, tiny, 1, "data={path: ../../text/data/testdata/rows/ids.jsonl, seq_len: 2}",
			"model.vocab_size=300"))
		if err != nil {
			t.Fatal(err)
		}
		got, err := train.Check(load(t, tiny, 1, "data={path: '"+dir+"', seq_len: 2}", "model.vocab_size=300"))
		if got != nil {
			got.Files, got.EncodingBytes = 1, want.EncodingBytes // files of a directory have other sizes
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, want)
		}
	}
}
