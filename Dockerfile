# Serves a bundle: docker build --build-arg BUNDLE=net.bundle -t net . && docker run -p 8000:8000 -p 8001:8001 net
FROM python:3.13-slim
WORKDIR /srv
COPY pyproject.toml uv.lock README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir uv && uv sync --frozen --no-default-groups --no-cache
ARG BUNDLE
COPY ${BUNDLE} bundle
ENV PATH=/srv/.venv/bin:$PATH
EXPOSE 8000 8001
# An executable is bound to the machine it was compiled for: this machine's are made first, then served.
CMD ["sh", "-c", "servax compile bundle && exec servax serve bundle --host 0.0.0.0 --require aot"]
