package plan

import (
	"bytes"
	"cmp"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"

	"github.com/cprun/cprun/partition"
)

func load(t *testing.T, ranks int, set ...string) *config.Config {
	t.Helper()
	cfg, err := config.Load("../../../examples/opticks.yaml", config.Options{Ranks: ranks, Device: "cpu", Set: set})
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func onCPU(t *testing.T, cfg *config.Config) Options {
	t.Helper()
	c, err := backend.Choose(cfg, machine.CPU(), 0)
	if err != nil {
		t.Fatal(err)
	}
	return Options{Machine: machine.CPU(), Choice: c}
}

func make4(t *testing.T, set ...string) *Plan {
	t.Helper()
	p, err := Make(load(t, 4, set...), 4, onCPU(t, load(t, 4, set...)))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPartitionAndHopsOfTheExample(t *testing.T) {
	p := make4(t, "data.seq_len=2048", "parallel.layout=zigzag", "parallel.algorithm=ring")
	if p.Partition.Balance != 1 {
		t.Errorf("balance of a zigzag = %v, want 1", p.Partition.Balance)
	}
	pairs, tokens := 0, 0
	for _, r := range p.Partition.PerRank {
		pairs += r.Pairs
		tokens += r.Tokens
	}
	if tokens != 2048 || pairs != 2048*2049/2 {
		t.Errorf("%d tokens and %d pairs, want 2048 and %d", tokens, pairs, 2048*2049/2)
	}
	hopPairs := 0
	for _, r := range p.Hops {
		for _, h := range r.Hops {
			hopPairs += h.Pairs
		}
	}
	if hopPairs != pairs {
		t.Errorf("the hops compute %d pairs, the partition has %d", hopPairs, pairs)
	}
	// Rank 0 has chunks 0 and 7. In hop 0 it sends only chunk 0: no later rank in its half of the ring sees chunk 7,
	// and only its owner needs it.
	model := func(key string) int64 { return p.Config["model"].(map[string]any)[key].(int64) }
	row := 4 * 2 * model("num_key_value_heads") * (model("hidden_size") / model("num_attention_heads"))
	if got, want := p.Hops[0].Hops[0].SendBytes, 256*row; got != want {
		t.Errorf("rank 0 sends %d bytes in hop 0, want the 256 rows of its first chunk, %d", got, want)
	}
}

func TestShardingHalvesTheOptimizer(t *testing.T) {
	whole, sharded := make4(t, "memory.shard=none"), make4(t)
	if got, want := sharded.Memory.Optimizer, whole.Memory.Optimizer/4; got != want {
		t.Errorf("optimizer of one of 4 ranks takes %d bytes, want %d", got, want)
	}
}

func TestMoreRanksTakeFewerActivations(t *testing.T) {
	one, err := Make(load(t, 1), 1, onCPU(t, load(t, 1)))
	if err != nil {
		t.Fatal(err)
	}
	four := make4(t)
	if four.Memory.Activations >= one.Memory.Activations {
		t.Errorf("activations of one of 4 ranks %d, of the only rank %d", four.Memory.Activations,
			one.Memory.Activations)
	}
	if one.Communication.Total != 0 {
		t.Errorf("a single rank sends %d bytes", one.Communication.Total)
	}
}

// The picture marks each position's owner.
func TestPictureMarksEveryPosition(t *testing.T) {
	for _, n := range []int{1, 7, 63, 64, 65, 100, 1000, 4099} {
		for _, layout := range []partition.Layout{partition.Contiguous{}, partition.Zigzag{}, partition.Striped{}} {
			for _, size := range []int{1, 3, 8, 100} {
				for rank := range size {
					columns := min(48, n)
					want, part := bytes.Repeat([]byte("."), columns), RankPart{}
					spans := layout.Spans(n, size, rank)
					for _, s := range spans {
						part.Spans = append(part.Spans, Span(s))
					}
					for _, x := range partition.Positions(spans) {
						want[x*columns/n] = '#'
					}
					if got := part.row(n, 48); !bytes.Equal(got, want) {
						t.Fatalf("%s, %d of %d ranks, %d positions: %s, want %s", layout.Name(), rank, size, n, got,
							want)
					}
				}
			}
		}
	}
}

var update = flag.Bool("update", false, "rewrite testdata")

// written writes all that the text of a plan has.
func written(w io.Writer, p *Plan) error {
	return cmp.Or(p.Summary(w, 80, []string{"data: 1 file"}), p.Details(w, 80))
}

// This checks the text for users; a reviewer looks at changes of it.
func TestText(t *testing.T) {
	cfg := load(t, 4, "data.seq_len=1000", "parallel.layout=zigzag", "parallel.algorithm=ring")
	o := onCPU(t, cfg)
	o.Costs = Costs{Table: round(), Cores: 2}
	p, err := Make(cfg, 4, o)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := written(&b, p); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", "opticks.txt")
	if *update {
		if err := os.WriteFile(path, b.Bytes(), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if b.String() != string(want) {
		t.Errorf("the plan reads\n%s\nwant (go test -update rewrites it)\n%s", b.String(), want)
	}
	for line := range strings.Lines(b.String()) {
		if len(line) > 81 {
			t.Errorf("%d columns: %s", len(line), line)
		}
	}
}

// The hops of all pairs of many ranks would fill the memory. The plan has the hops of the first ranks.
func TestHopsOfManyRanksAreBounded(t *testing.T) {
	for ranks, want := range map[int]int{4: 4, 150: 128} {
		cfg := load(t, ranks, "data.seq_len=4096")
		p, err := Make(cfg, ranks, onCPU(t, cfg))
		if err != nil {
			t.Fatal(err)
		}
		if len(p.Hops) != want || p.Hops[want-1].Rank != want-1 || p.Partition.Ranks != ranks {
			t.Errorf("%d ranks: hops of %d", ranks, len(p.Hops))
		}
	}
}
