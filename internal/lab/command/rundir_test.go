package command

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
)

// A shell reads back each word of a command line, which a terminal can print.
func TestShell(t *testing.T) {
	for _, word := range []string{"", "plain-1", "two words", "it's $HOME", "a\nFORGED", "\x1b[2J'\\'", "é\u202e7", "\xff1"} {
		line := Shell([]string{"printf", "%s", word})
		if got := terminal.Line(line); got != line {
			t.Errorf("%q: a terminal shows %q as %q", word, line, got)
		}
		if out, err := exec.Command("bash", "-c", line).Output(); err != nil || string(out) != word {
			t.Errorf("%q: bash reads %q as %q, %v", word, line, out, err)
		}
	}
	if got := Shell([]string{"cprun", "train.yaml"}); strings.ContainsAny(got, "'$") {
		t.Errorf("plain words are quoted: %s", got)
	}
}

// A launcher's log that is incomplete is reported, except after a failed job: the failed rank comes last.
func TestIncompleteLogAfterAFailure(t *testing.T) {
	for _, code := range []int{launch.ExitDone, launch.ExitFailed} {
		root := must.Have(os.OpenRoot(t.TempDir()))
		defer root.Close()
		var stderr strings.Builder
		l := must.Have(openLog(root, "launcher.log", progress.New(&stderr, progress.Options{}), &TrainOptions{}))
		l.f.Close()
		l.end(launch.Result{ExitCode: code})
		l.close()
		if said := stderr.Len() > 0; said != (code == launch.ExitDone) {
			t.Errorf("exit status %d: %q", code, stderr.String())
		}
	}
}
