package train_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Each entry of data.validation.path has its own loss, as a run with it alone; the loss of all is the mean over all targets.
func TestSourcesAreValidatedApart(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"code/a.txt": strings.Repeat("func main() { return }", 3),
		"chat.jsonl": `{"input_ids":[7,8,9,10,11,12],"loss_mask":[0,0,1,1,0,1]}` + "\n" + `{"input_ids":[1,2,3],"loss_mask":[0,1,1]}`,
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	code, chat := filepath.Join(dir, "code/*.txt"), filepath.Join(dir, "chat.jsonl")
	run := func(ranks int, path string, set ...string) (of map[string]float64) {
		steps := curve(t, tiny, ranks, append(set, "data.seq_len=16", "train.steps=1", "optimizer.lr=1e-30",
			"data.validation={path: "+path+", every: 1}")...)
		last := steps[len(steps)-1]
		of = map[string]float64{"": float64(*last.ValLoss)}
		for name, loss := range last.ValLosses {
			of[name] = float64(loss)
		}
		return of
	}
	one := map[string]float64{"code": run(1, code)[""], "chat": run(1, chat)[""]}
	const codeTargets, chatTargets = 4 * 16, 3 + 2
	want := (one["code"]*codeTargets + one["chat"]*chatTargets) / (codeTargets + chatTargets)
	for i, set := range [][]string{{"parallel.data=1"}, {"parallel.data=2", "train.global_batch_size=2"},
		{"train.micro_batch_size=2", "train.global_batch_size=2", "parallel.data=1"}} {
		path := fmt.Sprintf("[%s, %s]", code, chat)
		if i == 1 {
			path = fmt.Sprintf("[{path: %s, weight: 3}, {path: %s}]", chat, code)
		}
		got := run(2, path, set...)
		for name, loss := range map[string]float64{"": want, "code": one["code"], "chat": one["chat"]} {
			if !(math.Abs(got[name]-loss) <= 1e-5) || len(got) != 3 {
				t.Errorf("%v, %s: %q has %v, want %v", set, path, name, got[name], loss)
			}
		}
	}
	if got := run(1, chat); len(got) != 1 {
		t.Errorf("one source: %v", got)
	}
}
