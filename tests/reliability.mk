# Included from the Makefile. Both need a compiler, take minutes, and leave their files below build/.
#
#   make test-asan     the suite with the C library under AddressSanitizer and UndefinedBehaviorSanitizer
#   make fuzz          the parsers under atheris (pip install atheris), FUZZ_SECONDS each, from the committed corpus

RUN ?= python
FUZZ_SECONDS ?= 60
SANITIZE = -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
ASAN_TESTS ?= tests

# The interpreter itself frees little at its end, so leaks are not looked for. torch brings a C++ runtime that has to
# be there before AddressSanitizer looks for it.
.PHONY: test-asan
test-asan:
	rm -rf build/asan
	mkdir -p build/asan
	cp -r ktforge plugins native tests docs demo benchmarks requirements *.md *.toml *.yml *.py Makefile build/asan/
	rm -f build/asan/ktforge/_native*.so
	cd build/asan && CFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" $(RUN) setup.py -q build_ext --inplace
	cd build/asan && LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0:allow_user_segv_handler=1 UBSAN_OPTIONS=print_stacktrace=1 \
		PYTHONPATH=.:plugins $(RUN) -c "import ktforge._native as n, sys, pytest; assert 'asan' in n.__file__; sys.exit(pytest.main(['-p', 'no:cacheprovider', *sys.argv[1:]]))" $(ASAN_TESTS)

.PHONY: fuzz
fuzz:
	mkdir -p build/fuzz
	for target in safetensors config index pipeline journal; do \
		mkdir -p build/fuzz/$$target; \
		$(RUN) tests/fuzz/fuzz.py $$target -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=3000 -timeout=20 \
			-artifact_prefix=build/fuzz/$$target- build/fuzz/$$target tests/fuzz/corpus/$$target || exit 1; \
	done
