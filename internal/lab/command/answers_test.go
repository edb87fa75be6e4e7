package command

import (
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/config"
)

// TestAnswersNeedFlash checks that answers are refused with fused attention alone.
func TestAnswersNeedFlash(t *testing.T) {
	for backend, refused := range map[string]bool{"fused": true, "flash": false, "reference": false} {
		var cfg config.Config
		cfg.Parallel.Backend, cfg.Log.Samples.Every = backend, 1
		err := checkAnswers(&cfg)
		if (err != nil) != refused || refused && !strings.Contains(err.Error(), "attention.backend flash") {
			t.Errorf("%s: %v", backend, err)
		}
		if cfg.Log.Samples.Every = 0; checkAnswers(&cfg) != nil {
			t.Errorf("%s is refused without answers", backend)
		}
	}
}
